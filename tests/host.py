"""What the installed vLLM-Omni makes of a command line, a deploy YAML and keyword arguments, without a model."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

THREE = ("diffusion_compile_vae", "diffusion_compile_dynamic", "diffusion_compile_granularity")
CONFIG = "diffusion_compile_config"


@contextmanager
def serve_parser() -> Iterator[Any]:
    """Build the parser as `vllm serve MODEL --omni` does, which takes seconds; `sys.argv` says so meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["vllm", "serve", "MODEL", "--omni"])
        from vllm_omni.entrypoints.cli.serve import OmniServeCommand
        from vllm_omni.utils.tracking_parser import TrackingArgumentParser

        root = TrackingArgumentParser()
        command = OmniServeCommand()
        command.subparser_init(root.add_subparsers(dest="subparser"))
        yield root


def generic(folder: Path) -> str:
    """Make a model that no registered pipeline claims; resolving its stages reads the index alone."""
    folder.mkdir()
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "Flux2KleinPipeline"}))
    (folder / "transformer").mkdir()
    (folder / "transformer" / "config.json").write_text("{}")
    return str(folder)


def resolve(
    model: str, release: tuple[int, int], deploy: Path | None = None, overrides: Any = None, **kwargs: Any
) -> list[dict[str, Any]]:
    """Resolve stages through the entry point that the release's own engine calls."""
    given = dict(kwargs)
    if deploy is not None:
        given["deploy_config"] = str(deploy)
    if overrides is not None:
        given["stage_overrides"] = overrides
    if release >= (0, 30):
        from vllm_omni.engine.omni_engine_base import OmniEngineBase as Engine
    else:
        from vllm_omni.engine.async_omni_engine import AsyncOmniEngine as Engine
    engine = object.__new__(Engine)
    engine._omni_lb_policy = "random"
    _, stages = engine._resolve_stage_configs(model, given, trust_remote_code=None)
    return [_engine_args(stage) for stage in stages]


def _engine_args(stage: Any) -> dict[str, Any]:
    """Engine arguments of a resolved stage, whatever the release keeps them in."""
    if hasattr(stage, "diffusion_config") and stage.diffusion_config is not None:
        return {name: getattr(stage.diffusion_config, name) for name in (*THREE, CONFIG)} | {
            "enforce_eager": stage.model_config.enforce_eager
        }
    if hasattr(stage, "engine_args"):
        return dict(stage.engine_args)
    return {}
