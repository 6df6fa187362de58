"""`vllm serve --omni` flags."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from vllm_omni_diffusion_compile.errors import SettingError
from vllm_omni_diffusion_compile.settings import (
    CONFIG,
    KEYS,
    NAMES,
    OWN,
    VAE,
    DiffusionCompileSettings,
    WarmupConfig,
    merged,
    plain_config,
    read_config,
)
from vllm_omni_diffusion_compile.upstream.log import host_logger

logger = host_logger(__name__)

# Where vLLM keeps what `-O`, `-cc` and their long forms say.
_LANGUAGE_MODEL_FLAGS = {
    "compilation_config": "--compilation-config (-cc, -O.key)",
    "optimization_level": "--optimization-level (-O)",
}

# How long a stage, and all of them, may take to start where VAE decode is compiled and warmed up, in seconds. vLLM-Omni
# waits 300 and 600; full scope with a transformer of 3.9 B parameters took 303 on an H200.
_START_S = 1800
# What loading the weights may take beside a budget for warming up, in seconds.
_LOADING_S = 600
_START_TIMEOUTS = {"stage_init_timeout": "--stage-init-timeout", "init_timeout": "--init-timeout"}


def add_flags(add_cli_args: Callable[..., Any], *, missing: Callable[[str], bool]) -> Callable[..., Any]:
    """Add our flags to a parser for `--omni`, those that the release lacks when the parser is built."""

    @functools.wraps(add_cli_args)
    def with_flags(parser: Any, *args: Any, **kwargs: Any) -> Any:
        parser = add_cli_args(parser, *args, **kwargs)
        omni = "--omni" in sys.argv or "--omni" in (getattr(parser, "usage", None) or "")
        ours = [name for name in OWN if omni and missing(name) and _flag(name) not in parser._option_string_actions]
        if ours:
            group = parser.add_argument_group(
                title="DiffusionCompileConfig", description="Configuration of vllm-omni-diffusion-compile."
            )
            for name in ours:
                group.add_argument(_flag(name), default=None, **_ARGUMENTS[name])
        return parser

    return with_flags


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _read_json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({error}); {_EXPECTED_JSON}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object; {_EXPECTED_JSON}")
    return value


class _StoreMapping(argparse.Action):
    """Store a checked mapping; given again, key by key.

    vLLM's parser turns all dotted flags into one JSON object, which it puts behind the other arguments: what was said
    in JSON beside them would be lost if the last one won.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest, None)
        value = merged(before, values) if isinstance(before, dict) else values
        try:
            plain_config(value, _flag(self.dest))
        except SettingError as error:
            raise argparse.ArgumentError(self, str(error)) from None
        setattr(namespace, self.dest, value)


def _description(name: str) -> str:
    return str(DiffusionCompileSettings.model_fields[name].description)


_EXPECTED_JSON = f"""expected a JSON object such as '{{"on_failure": "raise"}}', or {_flag(CONFIG)}.on_failure raise"""
_ARGUMENTS: dict[str, dict[str, Any]] = {
    VAE: {"action": argparse.BooleanOptionalAction, "help": f"{_description(VAE)} (default: True)"},
    CONFIG: {
        "action": _StoreMapping,
        "type": _read_json,
        "metavar": "JSON",
        # Without a space or a hyphen in it, the help does not break the example into two lines.
        "help": """How the compiler is used, as JSON: '{"on_failure":"raise"}'; or key by key: """
        f"{_flag(CONFIG)}.on_failure raise. Keys: {', '.join(KEYS)}. (default: {{}})",
    },
}


def name_flags_without_effect(validate: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(validate)
    def with_warning(self: Any, args: Any) -> None:
        validate(self, args)
        given: Collection[str] = getattr(args, "explicit_keys", frozenset())
        flags = [flag for dest, flag in _LANGUAGE_MODEL_FLAGS.items() if dest in given]
        if flags and getattr(args, "omni", False):
            logger.warning(
                "%s: reaches language-model stages only. Diffusion stages are compiled as "
                "%s say; --enforce-eager switches all of it off.",
                ", ".join(flags), ", ".join(map(_flag, NAMES)),
            )  # fmt: skip

    return with_warning


def give_time_to_compile(validate: Callable[..., None]) -> Callable[..., None]:
    """Where the user says nothing of the start-up time-outs, have them hold for what we add to the start."""

    @functools.wraps(validate)
    def with_time(self: Any, args: Any) -> None:
        validate(self, args)
        given = getattr(args, "explicit_keys", None)
        start_s, budget_s = _start(vars(args))
        if not isinstance(given, frozenset) or not start_s or not getattr(args, "omni", False):
            return
        short = [name for name in _START_TIMEOUTS if name not in given and getattr(args, name, start_s) < start_s]
        for name in short:
            setattr(args, name, start_s)
        if short:
            args.explicit_keys = given | frozenset(short)
            logger.info(
                "%s: %d s instead of the default, for compiling and warming up before the server is ready.",
                ", ".join(_START_TIMEOUTS[name] for name in short), start_s,
            )  # fmt: skip
        _name_contradictions({flag: getattr(args, name, None) for name, flag in _START_TIMEOUTS.items()}, budget_s)

    return with_time


def give_omni_time_to_compile(init: Callable[..., None]) -> Callable[..., None]:
    """Do the same for a program that uses `Omni`, whose time-outs are keyword arguments."""

    @functools.wraps(init)
    def with_time(self: Any, model: str, **kwargs: Any) -> None:
        start_s, budget_s = _start(kwargs)
        if start_s:
            _name_contradictions({name: kwargs.get(name) for name in _START_TIMEOUTS}, budget_s)
            kwargs = dict.fromkeys(_START_TIMEOUTS, start_s) | kwargs
        init(self, model, **kwargs)

    return with_time


def _start(given: Mapping[str, Any]) -> tuple[int, float]:
    """Return the seconds that a start may take where the user does not say, and the budget for warming up.

    The first is 0 where nothing is compiled and warmed up before the server is ready.
    """
    warmups = list(_warmups(given))
    budget_s = max((warmup.budget_s or 0.0 for warmup in warmups), default=0.0)
    nothing_to_warm = given.get(VAE) is False and not any(warmup.shapes for warmup in warmups)
    if given.get("enforce_eager") or nothing_to_warm:
        return 0, budget_s
    return max(_START_S, math.ceil(budget_s + _LOADING_S) if budget_s else 0), budget_s


def _warmups(given: Mapping[str, Any]) -> Iterator[WarmupConfig]:
    """Find what arguments and the deploy YAML say of warmup, for any stage; what is wrong is said later."""
    stages: list[Any] = [given]
    overrides = given.get("stage_overrides")
    if isinstance(overrides, str):  # as 0.28.0 keeps it
        with contextlib.suppress(ValueError):
            overrides = json.loads(overrides)
    stages += list(overrides.values()) if isinstance(overrides, dict) else []
    path = given.get("deploy_config")
    if path is not None:
        with contextlib.suppress(OSError, ValueError, TypeError, yaml.YAMLError):
            stages += (yaml.safe_load(Path(path).read_text()) or {}).get("stages") or []
    for stage in stages:
        with contextlib.suppress(SettingError):
            yield read_config(stage.get(CONFIG) if isinstance(stage, dict) else None).warmup


def _name_contradictions(timeouts: Mapping[str, float | None], budget_s: float) -> None:
    """Say before anything is loaded that the host will end the start before the budget does."""
    for flag, timeout_s in timeouts.items():
        if timeout_s is not None and timeout_s <= budget_s:
            logger.warning(
                "%s.warmup.budget_s is %g and %s is %g: vLLM-Omni ends a start that takes that long, and loading the "
                "weights counts, too. Raise %s above the budget and the time to load, or lower the budget.",
                CONFIG, budget_s, flag, timeout_s, flag,
            )  # fmt: skip
