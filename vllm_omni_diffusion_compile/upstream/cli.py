"""`vllm serve --omni` flags."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Collection
from typing import Any

from vllm_omni_diffusion_compile.settings import VAE, DiffusionCompileSettings
from vllm_omni_diffusion_compile.upstream.log import host_logger

logger = host_logger(__name__)

_FLAG = "--diffusion-compile-vae"
# Where vLLM keeps what `-O`, `-cc` and their long forms say.
_LANGUAGE_MODEL_FLAGS = {
    "compilation_config": "--compilation-config (-cc, -O.key)",
    "optimization_level": "--optimization-level (-O)",
}

# How long a stage, and all of them, may take to start where VAE decode is compiled and warmed up, in seconds. vLLM-Omni
# waits 300 and 600; full scope with a transformer of 3.9 B parameters took 303 on an H200.
_START_S = 1800
_START_TIMEOUTS = {"stage_init_timeout": "--stage-init-timeout", "init_timeout": "--init-timeout"}


def add_flags(add_cli_args: Callable[..., Any], *, missing: Callable[[], bool]) -> Callable[..., Any]:
    """Add the flag to a parser for `--omni`, if the release lacks it when the parser is built."""

    @functools.wraps(add_cli_args)
    def with_flags(parser: Any, *args: Any, **kwargs: Any) -> Any:
        parser = add_cli_args(parser, *args, **kwargs)
        omni = "--omni" in sys.argv or "--omni" in (getattr(parser, "usage", None) or "")
        if omni and missing() and _FLAG not in parser._option_string_actions:
            group = parser.add_argument_group(
                title="DiffusionCompileConfig", description="Configuration of vllm-omni-diffusion-compile."
            )
            group.add_argument(
                _FLAG,
                action=argparse.BooleanOptionalAction,
                default=None,
                help=f"{DiffusionCompileSettings.model_fields[VAE].description} (default: True)",
            )
        return parser

    return with_flags


def name_flags_without_effect(validate: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(validate)
    def with_warning(self: Any, args: Any) -> None:
        validate(self, args)
        given: Collection[str] = getattr(args, "explicit_keys", frozenset())
        flags = [flag for dest, flag in _LANGUAGE_MODEL_FLAGS.items() if dest in given]
        if flags and getattr(args, "omni", False):
            logger.warning(
                "%s: reaches language-model stages only. Diffusion stages are compiled as "
                "--diffusion-compile-granularity, --diffusion-compile-dynamic and --diffusion-compile-vae say; "
                "--enforce-eager switches all of it off.",
                ", ".join(flags),
            )

    return with_warning


def give_time_to_compile(validate: Callable[..., None]) -> Callable[..., None]:
    """Where the user says nothing of the start-up time-outs, have them hold for what we add to the start."""

    @functools.wraps(validate)
    def with_time(self: Any, args: Any) -> None:
        validate(self, args)
        given = getattr(args, "explicit_keys", None)
        off = getattr(args, "enforce_eager", False) or getattr(args, VAE, None) is False
        if not isinstance(given, frozenset) or off or not getattr(args, "omni", False):
            return
        short = [name for name in _START_TIMEOUTS if name not in given and getattr(args, name, _START_S) < _START_S]
        for name in short:
            setattr(args, name, _START_S)
        if short:
            args.explicit_keys = given | frozenset(short)
            logger.info(
                "%s: %d s instead of the default, for compiling and warming up before the server is ready.",
                ", ".join(_START_TIMEOUTS[name] for name in short), _START_S,
            )  # fmt: skip

    return with_time
