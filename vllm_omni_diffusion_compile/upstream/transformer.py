"""Compile scopes in the model runner: which components, compiled how, and what the log says of it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from vllm_omni_diffusion_compile.errors import SettingError
from vllm_omni_diffusion_compile.settings import CONFIG, DiffusionCompileSettings
from vllm_omni_diffusion_compile.upstream.protect import Protect

_RUNNER = "vllm_omni.diffusion.worker.diffusion_model_runner"
# What the release compiles where a pipeline declares no _dit_modules.
_USUAL = ("transformer", "transformer_2")

# MiniMax-H3: the argument of its blocks that says how many rows are not padding, as Dynamo calls it, and its blocks
# that work on the rows of the prompt.
_USED_ROWS = "L['max_seqlen']"
_OF_PROMPT_ROWS = ("MiniMaxH3TokenRefinerBlock",)

# Modules that torch 2.11 to 2.13 computes wrongly in a graph of dynamic shapes, without a word: for a module's own
# number `torch.add(self.eps, x, alpha=a)` loses `a` there. For Anima that is 0.8 of the output's scale. Only full scope
# has the module in a graph.
_WRONG_IF_DYNAMIC = ("CosmosLearnablePositionalEmbed",)
# On OmniVoice's generator: what captures CUDA graphs of it while it runs. Code that is traced for the first time within
# a capture ends both.
_CAPTURES = "_cuda_graph_fwd"

# On a pipeline: what of its blocks' arguments is dynamic whatever the setting.
_DYNAMIC = "_diffusion_compile_dynamic_source"
# On a pipeline: the ranks that run it in lockstep.
_RANKS = "_diffusion_compile_ranks"


def compile_scopes(compile_transformer: Callable[[Any, str], None]) -> Callable[[Any, str], None]:
    """Compile with regions found, fallback and a true log line, where the release would call torch.compile bare."""

    @functools.wraps(compile_transformer)
    def _compile_transformer(self: Any, attr_name: str) -> None:
        if _leaves_to_release(self, attr_name):
            compile_transformer(self, attr_name)
        else:
            _compile_named(self.pipeline, attr_name, self.od_config)

    return _compile_transformer


def compile_with_own_backend(enable_offload_backend: Callable[..., Any]) -> Callable[..., Any]:
    """On a platform without inductor the release compiles nothing; a backend that the user named can."""

    @functools.wraps(enable_offload_backend)
    def with_backend(od_config: Any, pipeline: Any, *args: Any, **kwargs: Any) -> Any:
        pipeline, offload = enable_offload_backend(od_config, pipeline, *args, **kwargs)
        runner = sys.modules[_RUNNER]
        eager = getattr(od_config, "enforce_eager", True) or hasattr(pipeline, "setup_compile")
        if not eager and not runner.current_omni_platform.supports_torch_inductor():
            config = DiffusionCompileSettings.of(od_config).diffusion_compile_config
            if config.backend == "inductor":
                raise SettingError(
                    f"{CONFIG}.backend is 'inductor', but the platform {type(runner.current_omni_platform).__name__} "
                    "does not support it; use 'auto' to compile nothing, or name a backend that the platform brings"
                )
            for attr_name in () if config.needs_inductor else _named(pipeline):
                _compile_named(pipeline, attr_name, od_config)
        return pipeline, offload

    return with_backend


def agree_before(execute: Callable[..., Any]) -> Callable[..., Any]:
    """Between two requests all ranks learn what has failed to compile on one of them; see `RankGroup.run`.

    It is also the last that runs in the thread which computes, before it does.
    """

    @functools.wraps(execute)
    def agreed(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (source := getattr(self.pipeline, _DYNAMIC, None)) is not None:
            _take_as_dynamic(source)
        ranks = getattr(self.pipeline, _RANKS, None)
        if ranks is None:
            return execute(self, *args, **kwargs)
        return ranks.run(functools.partial(execute, self, *args, **kwargs))

    return agreed


def _leaves_to_release(runner: Any, attr_name: str) -> bool:
    """Whether somebody else decides how this component is compiled."""
    from torch import nn
    from vllm_omni.diffusion.compile import regionally_compile

    from vllm_omni_diffusion_compile.compile.components import resolve

    full = getattr(runner.od_config, "diffusion_compile_granularity", "regional") == "full"
    component = resolve(runner.pipeline, attr_name)
    if component is not None and not isinstance(component, nn.Module):
        # What wraps a module may pass on what the release asks of it; else the release skips it, and claims it. It
        # follows no dotted path.
        return "." not in attr_name and bool(getattr(component, "compile" if full else "_repeated_blocks", None))
    # Another plugin's function in its place: the release calls it with what it expects.
    theirs = getattr(sys.modules[_RUNNER], "regionally_compile", regionally_compile) is not regionally_compile
    return theirs and not full


def _named(pipeline: Any) -> Sequence[str]:
    """The components that the release asks to be compiled, in its order."""
    return getattr(pipeline, "_dit_modules", None) or _USUAL


def _compile_named(pipeline: Any, attr_name: str, od_config: Any) -> None:
    settings = DiffusionCompileSettings.of(od_config)
    if _pads_prompts(settings):
        setattr(pipeline, _DYNAMIC, _USED_ROWS)
    for path, component, beside in _components(pipeline, attr_name, settings):
        _compile(path, component, settings, _ranks(pipeline, od_config, settings), beside)


def _components(
    pipeline: Any, attr_name: str, settings: DiffusionCompileSettings
) -> Iterator[tuple[str, Any, Collection[Any]]]:
    """Yield path and module of what an attribute name that the release asks for stands for.

    With them: what is beside the part that denoises, for a component that the pipeline does not name.
    """
    from vllm_omni_diffusion_compile.compile.components import denoising_modules, missing_part, resolve
    from vllm_omni_diffusion_compile.errors import ComponentError

    component = resolve(pipeline, attr_name)
    if component is not None:
        yield attr_name, component, ()
        return
    config = settings.diffusion_compile_config
    if getattr(pipeline, "_dit_modules", None):
        missing = missing_part(pipeline, attr_name)
        if missing is not None:
            message = f"{type(pipeline).__name__} declares {attr_name!r} in _dit_modules, and {missing}"
            if config.on_failure == "raise":
                raise ComponentError(f"{message}; correct the declaration, or set on_failure to 'eager'")
            _logger().error("Model runner: %s; nothing of it is compiled.", message)
        return
    # A pipeline that names nothing and has none of the usual attributes: asked for once, under the first of them.
    if attr_name != _USUAL[0] or any(resolve(pipeline, usual) is not None for usual in _USUAL):
        return
    paths = [*(getattr(pipeline, "_vae_modules", None) or ()), *(getattr(pipeline, "_encoder_modules", None) or ())]
    beside = [part for path in paths if (part := resolve(pipeline, path)) is not None]
    found = [
        (*part, beside)
        for path, module in (denoising_modules(pipeline, beside) if config.infer_regions else ())
        for part in _with_blocks(path, module, beside, whole=settings.diffusion_compile_granularity == "full")
    ]
    yield from found
    if not found:
        _logger().warning(
            "Model runner: %s names no component in _dit_modules, and %s; nothing is compiled.",
            type(pipeline).__name__,
            "none of its modules consists of blocks that repeat" if config.infer_regions else "infer_regions is off",
        )


def _with_blocks(path: str, module: Any, beside: Collection[Any], *, whole: bool) -> Iterator[tuple[str, Any]]:
    """Yield the outermost modules, at or below a path, that have blocks to compile: GR00T's are in its action head.

    Where they are compiled as a whole, those that can be called: GR00T's action head cannot, and the model in it can.
    """
    from vllm_omni_diffusion_compile.compile.components import is_beside
    from vllm_omni_diffusion_compile.compile.regions import has_forward, inferred_regions

    with_blocks = getattr(module, "_repeated_blocks", None) or inferred_regions(module, beside)
    if with_blocks and (has_forward(module) or not whole):
        yield path, module
        return
    # Children alone: what else a module refers to may lead back to it.
    found = [
        part
        for name, child in module.named_children()
        if not is_beside(name) and not any(child is part for part in beside)
        for part in _with_blocks(f"{path}.{name}", child, beside, whole=whole)
    ]
    yield from found
    if with_blocks and not found:
        yield path, module


def _compile(
    path: str, component: Any, settings: DiffusionCompileSettings, ranks: Any | None, beside: Collection[Any]
) -> None:
    import torch

    from vllm_omni_diffusion_compile.compile.events import LOG
    from vllm_omni_diffusion_compile.compile.latch import first_line
    from vllm_omni_diffusion_compile.compile.scope import compile_component

    if not isinstance(component, torch.nn.Module):
        _logger().warning(
            "Model runner: %s is not compiled: it is of the class %s, which is no torch module.",
            path, type(component).__name__,
        )  # fmt: skip
        return
    scope, config = settings.diffusion_compile_granularity, settings.diffusion_compile_config
    if scope == "full" and getattr(component, _CAPTURES, None) is not None and torch.cuda.is_available():
        _logger().warning(
            "Model runner: %s is not compiled: it captures CUDA graphs of its own, within which nothing can be "
            "compiled. OMNIVOICE_CUDA_GRAPH=0 has it do without, unless its config.json says enable_cuda_graph.",
            path,
        )
        return
    protect = Protect(path, component, settings, ranks, _logger())
    outcome = compile_component(
        component, path, scope=scope, protect=protect, infer=config.infer_regions,
        eager=_OF_PROMPT_ROWS if _pads_prompts(settings) else (),
        outside=_WRONG_IF_DYNAMIC if settings.diffusion_compile_dynamic else (), beside=beside,
    )  # fmt: skip
    log = _logger()
    if outcome.error is not None:
        if config.on_failure == "raise":
            raise outcome.error
        log.warning(
            "Model runner: %s torch.compile setup for %s failed before activation (%s: %s); continuing eagerly.",
            scope, path, type(outcome.error).__name__, first_line(outcome.error),
        )  # fmt: skip
        LOG.record(
            "set-up failed", path, type(component).__name__,
            error=type(outcome.error).__name__, reason=first_line(outcome.error),
        )  # fmt: skip
    elif outcome.regions:
        log.info(
            "Model runner: %s configured for lazy %s torch.compile with dynamic=%s; %d module(s)%s will be compiled "
            "when the model calls them, %s: %s.",
            path, scope, settings.diffusion_compile_dynamic, sum(outcome.regions.values()),
            ", found by structure," if outcome.inferred else "",
            "with eager fallback" if config.on_failure == "eager" else "and a failure fails the request",
            ", ".join(f"{count} {cls}" for cls, count in outcome.regions.items()),
        )  # fmt: skip
    elif "another component" in outcome.reason:
        log.info("Model runner: %s: %s.", path, outcome.reason)
    elif scope == "full":
        log.warning(
            "Model runner: %s is not compiled: %s. --diffusion-compile-granularity regional looks for blocks in it.",
            path, outcome.reason,
        )  # fmt: skip
    else:
        log.warning(
            "Model runner: %s is not compiled: %s. --diffusion-compile-granularity full compiles it whole.",
            path, outcome.reason,
        )  # fmt: skip


def _pads_prompts(settings: DiffusionCompileSettings) -> bool:
    """Whether what follows the prompt's length has to be kept from being compiled for each of them.

    MiniMax-H3's blocks get the rows of the prompt and the video, padded to a bucket, and beside them how many are not
    padding: a number that only the attention kernel reads, and that Dynamo would compile anew for with static shapes.
    Its token refiner works on the prompt's rows alone, before they are padded: a few rows, in a hundredth of the time.
    """
    static = not settings.diffusion_compile_dynamic
    return static and settings.diffusion_compile_config.pad_seq_buckets is not None


def _take_as_dynamic(source: str) -> None:
    """Have Dynamo take an argument of any value; since torch 2.13 each thread, and each context, has its own say."""
    import torch

    known = torch.compiler.config.dynamic_sources
    if source not in known.split(","):
        torch.compiler.config.dynamic_sources = f"{known},{source}" if known else source


def _ranks(pipeline: Any, od_config: Any, settings: DiffusionCompileSettings) -> Any | None:
    """The ranks that run the model in lockstep, those of one data-parallel replica; None if this one is alone."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    if not hasattr(pipeline, _RANKS):
        setattr(pipeline, _RANKS, _rank_group(getattr(od_config, "parallel_config", None), settings))
    return getattr(pipeline, _RANKS)


def _rank_group(parallel_config: Any, settings: DiffusionCompileSettings) -> Any | None:
    """Make the groups of all replicas, as every rank has to, and return that of this rank."""
    import torch.distributed as dist
    from vllm_omni.diffusion.distributed.parallel_state import get_data_parallel_rank, get_world_group

    from vllm_omni_diffusion_compile.compile.ranks import RankGroup

    replicas: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(replicas, get_data_parallel_rank(), group=get_world_group().cpu_group)
    mine = None
    for replica in sorted(set(replicas)):
        members = [rank for rank, other in enumerate(replicas) if other == replica]
        group = dist.new_group(members, backend="gloo")
        if dist.get_rank() in members and len(members) > 1:
            fails_closed = settings.diffusion_compile_config.on_failure == "raise"
            mine = RankGroup(group, counted=_counted(parallel_config), fails_closed=fails_closed)
    return mine


def _counted(parallel_config: Any) -> bool:
    """Whether all that the ranks send is collectives of process groups; see `RankGroup`."""
    return all((getattr(parallel_config, degree, 1) or 1) == 1 for degree in ("tensor_parallel_size", "ring_degree"))


def _logger() -> Any:
    return sys.modules[_RUNNER].logger
