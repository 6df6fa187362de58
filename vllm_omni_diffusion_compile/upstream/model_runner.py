"""Compiled VAE decode in the model runner, and what a worker tells the engine about it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from vllm_omni_diffusion_compile.settings import VAE, DiffusionCompileSettings

_RUNNER = "vllm_omni.diffusion.worker.diffusion_model_runner"

# Pipelines whose declared VAE components should not be compiled, by path (`*` for all). Rechecked on 0.28.0 and 0.30.0.
_LEFT_ALONE: Mapping[str, Mapping[str, str]] = {
    "MiniMaxH3Pipeline": {
        "*": "MiniMax-H3 decodes with decode_latent, and compiling would switch its faster fused VAE kernels off",
    },
    "LancePipeline": {"*": "Lance decodes with decode_video, not decode"},
    "LingBotWorldCausalDMDPipeline": {
        "*": "LingBot-World decodes chunk by chunk with its streaming decoder, not with decode"
    },
}

# On a runner: what became of its VAE components.
_OUTCOMES = "_diffusion_compile_outcomes"


def add_compile_vae_decodes(_: None) -> Callable[[Any], None]:
    return _compile_vae_decodes


def _compile_vae_decodes(self: Any) -> None:
    """Compile `decode` of every component in the pipeline's `_vae_modules`, with eager fallback."""
    from vllm_omni_diffusion_compile.compile.vae import compile_decodes

    if not getattr(self.od_config, VAE, False) or getattr(self.od_config, "enforce_eager", False):
        return
    runner = sys.modules[_RUNNER]
    outcomes = compile_decodes(
        self.pipeline,
        runner.compile_callable_with_fallback,
        left_alone=_left_alone(self),
        options=_compile_options(self.od_config),
    )
    setattr(self, _OUTCOMES, outcomes)
    if not outcomes:
        runner.logger.info(
            "Model runner: %s declares no _vae_modules; no VAE decode is compiled.", type(self.pipeline).__name__
        )
    for outcome in outcomes:
        name = " = ".join((outcome.path, *outcome.also))
        if outcome.state == "compiled":
            runner.logger.info("Model runner: %s.decode will be compiled at its first call, with eager fallback.", name)
            if outcome.reason:
                runner.logger.info("Model runner: %s: %s.", name, outcome.reason)
        elif outcome.state == "left alone":
            runner.logger.info("Model runner: %s.decode is not compiled: %s.", name, outcome.reason)
        elif outcome.state == "not found":
            runner.logger.warning(
                "Model runner: %s names %r in _vae_modules, but no such component exists; its decode is not compiled.",
                type(self.pipeline).__name__, outcome.path,
            )  # fmt: skip


def compile_vae_after_load(load_model: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(load_model)
    def with_vae(self: Any, *args: Any, **kwargs: Any) -> None:
        _start_log()
        load_model(self, *args, **kwargs)
        pipeline = getattr(self, "pipeline", None)
        if _generic_compile(self):
            self._compile_vae_decodes()
        elif hasattr(pipeline, "setup_compile") and getattr(self.od_config, VAE, False):
            sys.modules[_RUNNER].logger.info(
                "Model runner: %s compiles itself with setup_compile(); its VAE decode is left to it.",
                type(pipeline).__name__,
            )

    return with_vae


def _start_log() -> None:
    """What is compiled from here on belongs to the start of this model, on this rank."""
    from torch import distributed

    from vllm_omni_diffusion_compile.compile.events import LOG

    LOG.ready = False
    LOG.rank = distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def add_compile_facts(_: None) -> Callable[[Any], dict[str, Any]]:
    return diffusion_compile_facts


def diffusion_compile_facts(self: Any) -> dict[str, Any]:
    """What was compiled in this worker, for the engine's warmup.

    Returns:
        `generic`: whether the model runner compiles this pipeline at all; `graphs`: graphs compiled in this process;
        `decodes`: VAE decodes that are compiled now; `decode_graphs`: graphs compiled during their calls.
    """
    from vllm_omni_diffusion_compile.compile.components import resolve
    from vllm_omni_diffusion_compile.compile.events import compiled_graphs
    from vllm_omni_diffusion_compile.compile.fallback import FallbackCallable

    runner = self.model_runner
    paths = [outcome.path for outcome in getattr(runner, _OUTCOMES, ()) if outcome.state == "compiled"]
    decodes = [
        decode for path in paths if isinstance(decode := resolve(runner.pipeline, f"{path}.decode"), FallbackCallable)
    ]
    return {
        "generic": _generic_compile(runner),
        "graphs": compiled_graphs(),
        "decodes": sum(not decode.latched for decode in decodes),
        "decode_graphs": sum(decode.graphs for decode in decodes),
    }


def _generic_compile(runner: Any) -> bool:
    """Whether the model runner itself compiles this pipeline, as `load_model` decides it."""
    pipeline = getattr(runner, "pipeline", None)
    if pipeline is None or getattr(runner.od_config, "enforce_eager", True) or hasattr(pipeline, "setup_compile"):
        return False
    if not DiffusionCompileSettings.of(runner.od_config).diffusion_compile_config.needs_inductor:
        return True
    return bool(sys.modules[_RUNNER].current_omni_platform.supports_torch_inductor())


def _compile_options(od_config: Any) -> dict[str, Any]:
    """What decode is compiled with: what the upstream change states, but for what the user asked for."""
    from vllm_omni_diffusion_compile.compile.backend import resolve_backend
    from vllm_omni_diffusion_compile.compile.vae import COMPILE_OPTIONS

    config = DiffusionCompileSettings.of(od_config).diffusion_compile_config
    options = dict(COMPILE_OPTIONS) | {"mode": config.mode}
    if not config.needs_inductor:
        del options["mode"]  # only inductor has modes
        options["backend"] = resolve_backend(config.backend)
    if config.on_failure == "raise":
        options["fails_closed"] = True
    return options


def _left_alone(runner: Any) -> dict[str, str]:
    reasons: dict[str, str] = {}
    for cls in type(runner.pipeline).__mro__:
        reasons = dict(_LEFT_ALONE.get(cls.__name__, {})) | reasons
    ranks = getattr(getattr(runner.od_config, "parallel_config", None), "vae_patch_parallel_size", 1) or 1
    if ranks > 1:
        reasons.setdefault(
            "*", f"it runs collectives over {ranks} ranks, and one that fell back alone would hang the others"
        )
    return reasons
