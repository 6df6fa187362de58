"""Compile scopes: the repeated blocks of a component (regional), or all of it (full)."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import nn

from vllm_omni_diffusion_compile.compile.fallback import FallbackCallable
from vllm_omni_diffusion_compile.compile.numbers import NUMBERS
from vllm_omni_diffusion_compile.compile.regions import (
    Region,
    callable_members,
    declared_regions,
    has_forward,
    hooks_of,
    inferred_regions,
)
from vllm_omni_diffusion_compile.compile.state import ArgumentState, ComponentState, State

Scope = Literal["regional", "full"]

# Where vLLM-Omni's hooks (offload, caches) keep the forward that they dispatch to.
_ORIGINAL_FORWARD = "_omni_original_forward"


class Protect(Protocol):
    """Makes the callable that falls back, and says what `torch.compile` is given."""

    def compile_options(self, region: str) -> Mapping[str, Any]:
        """Options of `torch.compile` for regions of a class."""

    def __call__(
        self, eager: Callable[..., Any], compiled: Callable[..., Any], region: str, state: State
    ) -> FallbackCallable:
        """Wrap what `torch.compile` returned; callables of one region class share their latch."""


@dataclass(frozen=True, kw_only=True)
class ScopeOutcome:
    """What became of one component.

    Args:
        path: Of the component in its pipeline.
        scope: What was asked for.
        regions: How many modules of each class will be compiled at their first call; empty if nothing is.
        inferred: Whether the regions were inferred.
        reason: Why nothing is compiled; else empty.
        error: What `torch.compile` raised while it was set up; the component is as it was.
    """

    path: str
    scope: Scope
    regions: Mapping[str, int] = field(default_factory=dict)
    inferred: bool = False
    reason: str = ""
    error: Exception | None = None


def compile_component(  # noqa: PLR0913 - each is one decision of its caller
    component: nn.Module,
    path: str,
    *,
    scope: Scope,
    protect: Protect,
    infer: bool,
    eager: Collection[str] = (),
    outside: Collection[str] = (),
    beside: Collection[Any] = (),
) -> ScopeOutcome:
    """Set a component up to be compiled at its first call: all of it or nothing.

    Args:
        component: The component; in regional scope the forwards of its blocks are replaced, in full scope what calling
            it does.
        path: How its pipeline calls it.
        scope: `regional` or `full`.
        protect: See `Protect`.
        infer: Whether to infer the blocks of a component that declares none.
        eager: Classes of blocks that are left as they are in regional scope.
        outside: Classes of modules that are called without the compiler in full scope, between two graphs.
        beside: What in the component has no blocks to infer: an encoder, a VAE.
    """
    NUMBERS.keep_constant()
    if scope == "full":
        return _compile_all(component, path, protect, outside)
    regions, inferred, reason = _regions(component, infer, beside)
    regions = [region for region in regions if region.cls not in eager]
    if not regions:
        return ScopeOutcome(path=path, scope=scope, reason=reason)
    try:
        forwards = [(region, *_compiled(region, protect)) for region in regions]
    except Exception as error:  # noqa: BLE001 - nothing was assigned yet, so eager is what is there
        return ScopeOutcome(path=path, scope=scope, reason="torch.compile could not be set up", error=error)
    for region, before, forward in forwards:
        _replace_forward(region.module, before, forward)
    counts = Counter(region.cls for region in regions)
    return ScopeOutcome(path=path, scope=scope, regions=dict(counts), inferred=inferred)


def _regions(component: nn.Module, infer: bool, beside: Collection[Any]) -> tuple[list[Region], bool, str]:
    """Return regions that are not compiled yet, whether they were inferred, and why there are none."""
    declared = tuple(getattr(component, "_repeated_blocks", None) or ())
    lists = tuple(getattr(component, "_layerwise_offload_blocks_attrs", None) or ())
    regions = declared_regions(component, declared, lists)
    inferred = not declared
    if declared and not regions:
        return [], False, f"it declares _repeated_blocks {list(declared)}, and has no module of these classes"
    if inferred:
        if not infer:
            return [], False, "it declares no _repeated_blocks, and infer_regions is off"
        regions = inferred_regions(component, beside)
    if not regions:
        return [], True, "it declares no _repeated_blocks, and most of it does not repeat"
    fresh = [region for region in regions if not isinstance(_forward_of(region.module), FallbackCallable)]
    return fresh, inferred, "" if fresh else "its blocks are compiled as those of another component"


def _compiled(region: Region, protect: Protect) -> tuple[Callable[..., Any], FallbackCallable]:
    eager = _forward_of(region.module)
    compiled = torch.compile(eager, **protect.compile_options(region.cls))
    return eager, protect(eager, compiled, region.cls, ArgumentState())


def _forward_of(module: nn.Module) -> Callable[..., Any]:
    """Return the forward that computes, inside of whatever hooks dispatch to it."""
    return getattr(module, _ORIGINAL_FORWARD, None) or module.forward


def _replace_forward(module: nn.Module, eager: Callable[..., Any], forward: Callable[..., Any]) -> None:
    if getattr(module, _ORIGINAL_FORWARD, None) is None:
        module.forward = forward
        return
    # Hooks move weights and synchronize streams, which must stay out of the graph; some keep a reference of their own.
    setattr(module, _ORIGINAL_FORWARD, forward)
    for hook in hooks_of(module):
        reference = getattr(hook, "fn_ref", None)
        if reference is not None and reference.original_forward == eager:
            reference.original_forward = forward


def _compile_all(component: nn.Module, path: str, protect: Protect, outside: Collection[str]) -> ScopeOutcome:
    modules = _called_as_a_whole(component)
    if not modules:
        return ScopeOutcome(path=path, scope="full", reason="it has no forward(): its pipeline calls parts of it")
    for module in component.modules():
        if type(module).__name__ in outside:
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[no-untyped-call]  # torch's own
    before = [getattr(module, "_compiled_call_impl", None) for module in modules]
    try:
        for module in modules:
            module.compile(**protect.compile_options(type(module).__name__))
    except Exception as error:  # noqa: BLE001 - the component is called as before
        for module, call in zip(modules, before, strict=True):
            module._compiled_call_impl = call  # noqa: SLF001
        return ScopeOutcome(path=path, scope="full", reason="torch.compile could not be set up", error=error)
    for module in modules:
        # What `nn.Module.compile` sets, and calling the module then calls.
        compiled = getattr(module, "_compiled_call_impl", None)
        if compiled is not None:
            whole, state = _of_one_layout(module, compiled), ComponentState(module)
            module._compiled_call_impl = protect(module._call_impl, whole, type(module).__name__, state)  # noqa: SLF001
    return ScopeOutcome(path=path, scope="full", regions=Counter(type(module).__name__ for module in modules))


def _called_as_a_whole(component: nn.Module) -> list[nn.Module]:
    """The component; of a list of components its members; nothing if parts of it are called."""
    if has_forward(component) or has_own_compile(component):
        return [component]
    return callable_members(component) if isinstance(component, nn.ModuleList | nn.ModuleDict) else []


def has_own_compile(component: nn.Module) -> bool:
    """Whether a model decides itself what `compile` does."""
    return getattr(component.compile, "__func__", None) is not nn.Module.compile


def _of_one_layout(component: nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Have a compiled component called with latents that lie in one way.

    What pipelines make of noise is often a permuted view, and what the scheduler returns from the second step on is
    contiguous: a graph is compiled for each, which of a whole transformer takes minutes. The first parameter alone:
    what comes later may be a cache that is written to.
    """
    first = next(iter(inspect.signature(component.forward).parameters), "")

    def call(*args: Any, **kwargs: Any) -> Any:
        if args:
            return compiled(_contiguous(args[0]), *args[1:], **kwargs)
        if first in kwargs:
            kwargs[first] = _contiguous(kwargs[first])
        return compiled(*args, **kwargs)

    return call


def _contiguous(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.contiguous() if value.is_floating_point() else value
    return [_contiguous(item) for item in value] if type(value) is list else value
