"""A `vllm serve` command line, taken as far as the installed release takes it before anything starts.

Nothing here decides what is right: the parser, the checks and the configuration classes are the release's own, with our
grafts on them, so that what they refuse here is what a server would refuse.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_omni_diffusion_compile.errors import DiffusionCompileError

# Whose warnings are about the command line; see `log.host_logger`.
_OUR_LOGGER = "vllm.vllm_omni_diffusion_compile"
# Keyword arguments that the client keeps from the engine. Source: `OmniBase.__init__` and `build_async_omni`.
_OF_THE_CLIENT = (
    *("model", "model_tag", "stage_init_timeout", "init_timeout", "log_stats", "enable_ar_profiler"),
    *("output_modalities", "tts_batch_max_items", "diffusion_batch_size", "robot_openpi_idle_timeout"),
)


class RefusedLineError(DiffusionCompileError, ValueError):
    """The release refuses the command line, in the words of the message.

    Attributes:
        warnings: What a server warns of before it ends.
    """

    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A diffusion stage that the command line starts.

    Args:
        number: Its `stage_id`.
        config: The `OmniDiffusionConfig` that its workers are given.
    """

    number: int
    config: Any


@dataclass(frozen=True, kw_only=True)
class Line:
    """A command line that the release accepts.

    Args:
        model: As typed.
        flags: What was typed, by name of the setting.
        overrides: What `--stage-overrides` says, by stage.
        deploy_config: The deploy YAML that the release reads, its own profile of a model included; None if it reads
            none.
        stages: Its diffusion stages; None where the model is not on this machine, so that they are not known.
        warnings: What a server would warn of in its log.
    """

    model: str
    flags: Mapping[str, Any]
    overrides: Mapping[str, Mapping[str, Any]]
    deploy_config: str | None
    stages: tuple[Stage, ...] | None
    warnings: tuple[str, ...]


def read_line(words: Sequence[str]) -> Line:
    """Read `vllm serve MODEL --omni ...`.

    Raises:
        RefusedLineError: The release refuses it.
    """
    warnings: list[str] = []
    try:
        with _argv(["vllm", *words]), _heard(warnings):
            return _read(words, warnings)
    except RefusedLineError as error:
        error.warnings = tuple(dict.fromkeys(warnings))
        raise


def _read(words: Sequence[str], warnings: list[str]) -> Line:
    args = _parsed(words)
    model = str(getattr(args, "model_tag", None) or args.model)
    given = args.get_explicit_kwargs_dict()
    overrides = given.get("stage_overrides") or {}
    stages: tuple[Stage, ...] | None = None
    deploy_config = given.get("deploy_config")
    with _refusals():
        overrides = json.loads(overrides) if isinstance(overrides, str) else overrides
        if _is_here(model):
            _command().validate(args)
            given = args.get_explicit_kwargs_dict()
            deploy_config, stages = _resolved(model, given)
    return Line(
        model=model, flags=given, overrides=overrides, deploy_config=deploy_config, stages=stages,
        warnings=tuple(dict.fromkeys(warnings)),
    )  # fmt: skip


def _command() -> Any:
    from vllm_omni.entrypoints.cli.serve import OmniServeCommand

    return OmniServeCommand()


def _parsed(words: Sequence[str]) -> Any:
    from vllm_omni.utils.tracking_parser import TrackingArgumentParser

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            root = TrackingArgumentParser()
            _command().subparser_init(root.add_subparsers(dest="subparser"))
            return root.parse_args(list(words))
    except SystemExit:
        message = said.getvalue().rpartition("error: ")[2].strip() or "it only asks for help"
        raise RefusedLineError(message) from None
    except (argparse.ArgumentError, ValueError, TypeError) as error:
        raise RefusedLineError(str(error)) from error


def _resolved(model: str, given: Mapping[str, Any]) -> tuple[str | None, tuple[Stage, ...]]:
    """Return the deploy YAML and the diffusion stages that the release comes to."""
    from vllm_omni.engine import stage_init_utils
    from vllm_omni.engine.async_omni_engine import AsyncOmniEngine

    class Known(Exception):  # noqa: N818 - it is no error: it leaves the engine's constructor before anything starts
        pass

    class Engine(AsyncOmniEngine):  # type: ignore[misc] # its type is known when vLLM-Omni is there
        def _resolve_stage_configs(self, *args: Any, **kwargs: Any) -> Any:
            raise Known(super()._resolve_stage_configs(*args, **kwargs))

    try:
        Engine(model=model, **{name: value for name, value in given.items() if name not in _OF_THE_CLIENT})
    except Known as known:
        ((path, configs),) = known.args
    else:
        raise AssertionError("the engine resolves its stages in its constructor")
    stages: list[Stage] = []
    for config in configs:
        typed = hasattr(config, "diffusion_config")
        kind = config.stage_type
        if str(getattr(kind, "value", kind)) != "diffusion":
            continue
        metadata = (
            stage_init_utils.extract_stage_metadata_from_omni_stage_config(config)
            if typed
            else stage_init_utils.extract_stage_metadata(config)
        )
        od_config = stage_init_utils.build_diffusion_config(model, config, metadata)
        stages.append(Stage(number=int(config.stage_id), config=od_config))
    return (None if path is None else str(path)), tuple(stages)


def _is_here(model: str) -> bool:
    """Whether what a model is made of can be read without the network."""
    if Path(model).exists():
        return True
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return any(isinstance(try_to_load_from_cache(model, name), str) for name in ("model_index.json", "config.json"))
    except HFValidationError:
        return False


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Turn whatever ends the start of a server into one error."""
    try:
        yield
    except RefusedLineError:
        raise
    except Exception as error:
        first = str(error).strip() or type(error).__name__
        raise RefusedLineError(
            first if isinstance(error, ValueError) else f"{type(error).__name__}: {first}"
        ) from error


@contextlib.contextmanager
def _argv(argv: list[str]) -> Iterator[None]:
    """Have the command line of this process read like a server's: the release, and our grafts, look at it."""
    before = sys.argv
    sys.argv = argv
    try:
        yield
    finally:
        sys.argv = before


@contextlib.contextmanager
def _heard(warnings: list[str]) -> Iterator[None]:
    """Collect what this package warns of, in place of logging it."""

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(record.getMessage())

    logger, handler = logging.getLogger(_OUR_LOGGER), Collect(logging.WARNING)
    propagates, level = logger.propagate, logger.level
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates
        logger.setLevel(level)
