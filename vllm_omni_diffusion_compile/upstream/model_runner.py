"""Compiled VAE decode in the model runner, and what a worker tells the engine about it."""

from __future__ import annotations

import functools
import math
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from vllm_omni_diffusion_compile.settings import (
    VAE,
    DiffusionCompileSettings,
    declared_recompile_limit,
    declares_shapes,
)
from vllm_omni_diffusion_compile.upstream.protect import Protect, recompile_limit

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
    from vllm_omni_diffusion_compile.compile.events import LOG
    from vllm_omni_diffusion_compile.compile.vae import DecodePlan, compile_decodes, retry_in_tiles

    if not getattr(self.od_config, VAE, False) or getattr(self.od_config, "enforce_eager", False):
        return
    runner = sys.modules[_RUNNER]
    settings = DiffusionCompileSettings.of(self.od_config)
    config = settings.diffusion_compile_config
    if _patch_ranks(self) == 1 and (config.vae_scope == "blocks" or config.vae_policy == "never"):
        retry_in_tiles(self.pipeline, functools.partial(_rules, settings))
    if config.vae_scope == "blocks":
        _compile_blocks(self, settings)
        return
    options = _compile_options(settings)
    plan = DecodePlan(
        options=options,
        static_options=_static_options(settings, options),
        rules=functools.partial(_rules, settings),
    )
    outcomes = compile_decodes(
        self.pipeline, runner.compile_callable_with_fallback, left_alone=_left_alone(self, settings), plan=plan
    )
    setattr(self, _OUTCOMES, outcomes)
    LOG.ready_listeners.append(functools.partial(_agree, weakref.ref(self)))
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
    from vllm_omni_diffusion_compile.compile.events import compiled_graphs

    runner = self.model_runner
    decodes = _decodes(runner).values()
    return {
        "generic": _generic_compile(runner),
        "graphs": compiled_graphs(),
        "decodes": sum(not decode.latched for decode in decodes),
        "decode_graphs": sum(decode.graphs for decode in decodes),
    }


def _decodes(runner: Any) -> dict[str, Any]:
    """The decodes of a runner's pipeline that are compiled, or may be, by the path of the component."""
    from vllm_omni_diffusion_compile.compile.components import resolve
    from vllm_omni_diffusion_compile.compile.decode import ChosenDecode

    paths = [outcome.path for outcome in getattr(runner, _OUTCOMES, ()) if outcome.state == "compiled"]
    found = {path: resolve(runner.pipeline, f"{path}.decode") for path in paths}
    return {path: decode for path, decode in found.items() if isinstance(decode, ChosenDecode)}


def _generic_compile(runner: Any) -> bool:
    """Whether the model runner itself compiles this pipeline, as `load_model` decides it."""
    pipeline = getattr(runner, "pipeline", None)
    if pipeline is None or getattr(runner.od_config, "enforce_eager", True) or hasattr(pipeline, "setup_compile"):
        return False
    if not DiffusionCompileSettings.of(runner.od_config).diffusion_compile_config.needs_inductor:
        return True
    return bool(sys.modules[_RUNNER].current_omni_platform.supports_torch_inductor())


def _compile_options(settings: DiffusionCompileSettings) -> dict[str, Any]:
    """What decode is compiled with: what the upstream change states, but for what the user asked for."""
    from vllm_omni_diffusion_compile.compile.backend import resolve_backend
    from vllm_omni_diffusion_compile.compile.vae import COMPILE_OPTIONS

    config = settings.diffusion_compile_config
    options = dict(COMPILE_OPTIONS) | {"mode": config.mode}
    if not config.needs_inductor:
        del options["mode"]  # only inductor has modes
        options["backend"] = resolve_backend(config.backend)
    if config.on_failure == "raise":
        options["fails_closed"] = True
    return options


def _static_options(settings: DiffusionCompileSettings, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """The same for a graph of one declared shape; None if none are declared."""
    if not declares_shapes(settings):
        return None
    return {**options, "dynamic": False, **recompile_limit(declared_recompile_limit(settings))}


def _rules(settings: DiffusionCompileSettings, path: str) -> Any:
    from vllm_omni_diffusion_compile.compile.decode import Rules
    from vllm_omni_diffusion_compile.compile.events import LOG

    return Rules(
        measure=settings.diffusion_compile_config.vae_policy == "measure",
        declared=lambda: LOG.declared,
        ready=lambda: LOG.ready,
        told=functools.partial(_say_measured, path),
        tiled=functools.partial(_say_tiled, path),
    )


def _agree(of: Callable[[], Any]) -> None:
    """When the server is ready: have all ranks keep the same way of decoding, by what they measured together."""
    from torch import distributed

    runner = of()
    if runner is None or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return
    from vllm_omni.diffusion.distributed.parallel_state import get_world_group

    # Once, whatever was set up here: on another rank setting up may have failed.
    own = {path: decode.measured for path, decode in _decodes(runner).items()}
    ranks: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(ranks, own, group=get_world_group().cpu_group)
    for path, decode in _decodes(runner).items():
        decode.agree([measured.get(path, []) for measured in ranks])


def _say_measured(path: str, measured: Any) -> None:
    sys.modules[_RUNNER].logger.info(
        "Model runner: %s.decode of %s: eager %s, compiled%s %s: %s is used.",
        path, measured.shape, _milliseconds(measured.eager_s), " for this shape" if measured.static else "",
        _milliseconds(measured.compiled_s), measured.way,
    )  # fmt: skip


def _milliseconds(seconds: float) -> str:
    return "runs out of memory" if math.isinf(seconds) else f"{1000 * seconds:.1f} ms"


def _say_tiled(path: str, shape: str) -> None:
    sys.modules[_RUNNER].logger.warning(
        "Model runner: %s.decode of %s ran out of memory; retrying in tiles gave the result, and this shape is decoded "
        "in tiles from now on. --vae-use-tiling decodes in tiles from the start.",
        path, shape,
    )  # fmt: skip


def _compile_blocks(runner: Any, settings: DiffusionCompileSettings) -> None:
    """Compile the repeated blocks of each declared VAE's decoder instead of its decode."""
    from torch import nn

    from vllm_omni_diffusion_compile.compile.components import resolve
    from vllm_omni_diffusion_compile.compile.scope import compile_component

    log = sys.modules[_RUNNER].logger
    if (reason := _left_alone_everywhere(runner, settings)) is not None:
        log.info("Model runner: no blocks of a VAE are compiled: %s.", reason)
        return
    # One graph for all shapes, or one for each where they are known.
    static = declares_shapes(settings)
    settings = settings.model_copy(update={"diffusion_compile_dynamic": not static})
    for path in dict.fromkeys(getattr(runner.pipeline, "_vae_modules", None) or ()):
        component = resolve(runner.pipeline, path)
        decoder = getattr(component, "decoder", component)
        if not isinstance(decoder, nn.Module):
            log.info("Model runner: no blocks of %s are compiled: it is no module.", path)
            continue
        protect = Protect(path, decoder, settings, None, log)
        outcome = compile_component(decoder, path, scope="regional", protect=protect, infer=True)
        if outcome.error is not None:
            protect.setup_failed(type(decoder).__name__, outcome.error)
        elif outcome.regions:
            blocks = ", ".join(f"{count} {cls}" for cls, count in outcome.regions.items())
            log.info(
                "Model runner: blocks of %s will be compiled when it is called, with eager fallback: %s.", path, blocks
            )
        else:
            log.info("Model runner: no blocks of %s are compiled: %s.", path, outcome.reason)


def _left_alone(runner: Any, settings: DiffusionCompileSettings) -> dict[str, str]:
    reasons: dict[str, str] = {}
    for cls in type(runner.pipeline).__mro__:
        reasons = dict(_LEFT_ALONE.get(cls.__name__, {})) | reasons
    if (everywhere := _left_alone_everywhere(runner, settings)) is not None:
        reasons.setdefault("*", everywhere)
    return reasons


def _left_alone_everywhere(runner: Any, settings: DiffusionCompileSettings) -> str | None:
    """Why nothing of any VAE is compiled here; None if there is no such reason."""
    if settings.diffusion_compile_config.vae_policy == "never":
        return "vae_policy is 'never'"
    if (ranks := _patch_ranks(runner)) > 1:
        return f"it runs collectives over {ranks} ranks, and one that fell back alone would hang the others"
    return None


def _patch_ranks(runner: Any) -> int:
    """Over how many ranks one decode is spread, with collectives in it."""
    return int(getattr(getattr(runner.od_config, "parallel_config", None), "vae_patch_parallel_size", 1) or 1)
