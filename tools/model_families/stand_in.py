"""A pipeline that is only its name, its declarations and its component, and the host's own runner for it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tools.model_families.family import Family

RUNNER = "vllm_omni.diffusion.worker.diffusion_model_runner"


class Plain:
    """A part of a pipeline that is no module, as GR00T's policy is none."""


def stand_in(family: Family, component: torch.nn.Module) -> torch.nn.Module:
    """A pipeline of the real one's name and declarations that holds the component where the real one does.

    Declarations are read from the host's class, so that what the real pipeline does not declare is missing here too.
    """
    real = host_class(family.pipeline)
    declared = {name: getattr(real, name) for name in ("_dit_modules",) if hasattr(real, name)}
    if hasattr(real, "setup_compile"):
        declared["setup_compile"] = real.setup_compile
    name = real.__name__ if real is not None else "NoPipeline"
    if family.dit_modules is not None:
        declared["_dit_modules"] = list(family.dit_modules)
    pipeline: torch.nn.Module = type(name, (torch.nn.Module,), declared)()
    holder: Any = pipeline
    *parents, last = family.path.split(".")
    for parent in parents:
        setattr(holder, parent, Plain() if family.plain_parents else torch.nn.Module())
        holder = getattr(holder, parent)
    setattr(holder, last, component)
    for path, find in family.also.items():
        setattr(pipeline, path, find(component))
    return pipeline


def host_class(pipeline: str) -> Any:
    """The class that the host's registry has for a pipeline, or None for no name."""
    if not pipeline:
        return None
    from vllm_omni.diffusion.registry import DiffusionModelRegistry

    return DiffusionModelRegistry._try_load_model_cls(pipeline)  # noqa: SLF001 - as the host's own loader asks


class Records(logging.Handler):
    """Collects log lines, each once however many loggers hand it on."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._records: list[logging.LogRecord] = []

    @property
    def lines(self) -> list[str]:
        """What was logged, in order."""
        return [record.getMessage() for record in self._records]

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        if not any(record is other for other in self._records):
            self._records.append(record)


@contextmanager
def recorded_log() -> Iterator[Records]:
    """Collect what the host and our package log, and keep it off the terminal."""
    records = Records()
    loggers = [logging.getLogger(name) for name in ("vllm", "vllm_omni")]
    before = [(logger.level, logger.handlers, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers = [records]
        logger.propagate = False
        logger.setLevel(logging.INFO)
    try:
        yield records
    finally:
        for logger, (level, handlers, propagate) in zip(loggers, before, strict=True):
            logger.handlers = handlers
            logger.propagate = propagate
            logger.setLevel(level)


def load(pipeline: torch.nn.Module, od_config: Any, *, granularity: str, dynamic: bool) -> tuple[Any, list[str]]:
    """Let the host's `load_model` set up a pipeline that its loader hands it ready.

    Args:
        pipeline: The stand-in.
        od_config: The host's configuration.
        granularity: `regional` or `full`.
        dynamic: `diffusion_compile_dynamic`.

    Returns:
        The runner, and the lines that were logged.
    """
    from vllm_omni.diffusion.worker import diffusion_model_runner as host

    od_config.enforce_eager = False
    od_config.diffusion_compile_granularity = granularity
    od_config.diffusion_compile_dynamic = dynamic
    if hasattr(pipeline, "setup_compile"):
        pipeline.od_config = od_config
    runner = object.__new__(host.DiffusionModelRunner)
    runner.od_config = od_config
    runner.vllm_config = None
    runner.device = torch.get_default_device()
    runner.pipeline = None
    runner.kv_transfer_manager = None
    runner.prompt_embed_cache = None
    loader = SimpleNamespace(load_model=lambda **_: pipeline)
    with mock.patch.object(host, "DiffusersPipelineLoader", return_value=loader), recorded_log() as log:
        runner.load_model()
    return runner, log.lines
