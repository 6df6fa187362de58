"""The pipeline class of a stage, and what the release and the worker would make of the stage's choices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_omni_diffusion_compile.doctor.finding import Finding
from vllm_omni_diffusion_compile.errors import SettingError
from vllm_omni_diffusion_compile.settings import DiffusionCompileSettings
from vllm_omni_diffusion_compile.upstream.inspection.serve_line import Stage


def check_pipelines(stages: tuple[Stage, ...]) -> Iterator[Finding]:
    """Check the component paths that the stages' pipelines declare."""
    from vllm_omni_diffusion_compile.doctor.components import check_components

    for stage in stages:
        name = getattr(stage.config, "model_class_name", None)
        pipeline = _pipeline(name)
        if pipeline is None:
            yield Finding.unknown(
                f"stages[{stage.number}]",
                f"the pipeline {name!r} is not one of vLLM-Omni's own; what it declares is known when it is loaded",
            )
            continue
        if hasattr(pipeline, "setup_compile"):
            yield Finding.ok(pipeline.__name__, "has a setup_compile() of its own, which says what is compiled")
        yield from check_components(pipeline)


def check_compilers(settings: tuple[DiffusionCompileSettings, ...]) -> Iterator[Finding]:
    """Check that the compiler which the settings name is there, as a worker does before it loads weights."""
    from vllm_omni_diffusion_compile.compile.backend import resolve_backend

    for backend in dict.fromkeys(setting.diffusion_compile_config.backend for setting in settings):
        try:
            resolve_backend(backend)
        except SettingError as error:
            yield Finding.broken("backend", str(error), "do as it says: no worker starts without it")
        else:
            yield Finding.ok("backend", backend)


def selected_backends(stages: tuple[Stage, ...]) -> frozenset[str]:
    """Return the names of the attention backends that the stages select, in upper case."""
    names: set[str] = set()
    for stage in stages:
        attention: Any = getattr(stage.config, "diffusion_attention_config", None)
        specs = [getattr(attention, "default", None), *(getattr(attention, "per_role", None) or {}).values()]
        names |= {str(spec.backend).upper() for spec in specs if getattr(spec, "backend", None)}
    return frozenset(names)


def _pipeline(name: str | None) -> type | None:
    from vllm_omni.diffusion.registry import DiffusionModelRegistry

    found: type | None = DiffusionModelRegistry._try_load_model_cls(name) if name else None
    return found
