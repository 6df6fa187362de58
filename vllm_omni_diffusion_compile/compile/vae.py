"""VAE decode: which components of a pipeline have one, and putting the compiled one in its place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from vllm_omni_diffusion_compile.compile.components import resolve
from vllm_omni_diffusion_compile.compile.decode import ChosenDecode, Rules
from vllm_omni_diffusion_compile.compile.fallback import itself

# The whole decode as one graph where that is possible. `dynamic=None`: the first size is compiled as it is, the second
# one as dynamic, and later sizes are free.
COMPILE_OPTIONS: Mapping[str, Any] = {"mode": "default", "fullgraph": False, "dynamic": None}

# Methods of diffusers' and vLLM-Omni's VAEs that call the decoder tile by tile, and those that blend two tiles.
_TILE_LOOPS = (
    *("tiled_decode", "_tiled_decode"),
    *("spatial_tiled_decode", "temporal_tiled_decode", "_temporal_tiled_decode"),
)
_TILE_SEAMS = ("blend_v", "blend_h", "blend_t")

_NOT_CHUNKS = "chunked MP4 output goes through decode_with_chunks instead, which stays eager"

State = Literal["compiled", "left alone", "not found", "set-up failed"]


@dataclass(frozen=True, kw_only=True)
class DecodeOutcome:
    """What became of one declared VAE component.

    Args:
        path: As declared, dotted.
        state: `compiled`, or why not.
        reason: Why it was left alone, or what of it stays eager; else empty.
        also: Other declared paths that name the same component.
    """

    path: str
    state: State
    reason: str = ""
    also: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DecodePlan:
    """How decodes are compiled.

    Args:
        options: Of `torch.compile`, for a graph that serves all shapes.
        static_options: The same, for a graph of one shape; given if shapes are declared: then there is one for each of
            those, and none for all others.
        rules: How the decode of a component chooses, by the component's path; `static` is filled in.
    """

    options: Mapping[str, Any] = field(default_factory=lambda: COMPILE_OPTIONS)
    static_options: Mapping[str, Any] | None = None
    rules: Callable[[str], Rules] = lambda _: Rules()


def compile_decodes(
    pipeline: Any,
    compile_callable: Callable[..., tuple[Callable[..., Any], bool]],
    *,
    left_alone: Mapping[str, str],
    plan: DecodePlan | None = None,
) -> list[DecodeOutcome]:
    """Compile `decode` of every component that a pipeline declares in `_vae_modules`.

    Args:
        pipeline: Has `_vae_modules`, a list of attribute paths; none is fine.
        compile_callable: `(function, label=..., **options) -> (callable, activated)`.
        left_alone: Paths not to compile (`*` for all), with the reason.
        plan: How they are compiled; one graph for all shapes if left out.

    Returns:
        One outcome a component, each component once however many names it has.
    """
    names: dict[int, list[str]] = {}
    outcomes: list[DecodeOutcome] = []
    components: dict[int, Any] = {}
    for path in dict.fromkeys(getattr(pipeline, "_vae_modules", None) or ()):
        component = resolve(pipeline, path)
        if component is None:
            outcomes.append(DecodeOutcome(path=path, state="not found"))
            continue
        components[id(component)] = component
        names.setdefault(id(component), []).append(path)
    for identity, (path, *also) in names.items():
        state: State = "left alone"
        reason = left_alone.get(path) or left_alone.get("*") or ""
        if not reason:
            make = functools.partial(compile_callable, label=f"{path}.decode")
            state, reason = _compile_decode(components[identity], make, plan or DecodePlan(), path)
        outcomes.append(DecodeOutcome(path=path, state=state, reason=reason, also=tuple(also)))
    return outcomes


def retry_in_tiles(pipeline: Any, rules: Callable[[str], Rules]) -> None:
    """Have decodes that are not compiled tried once more in tiles where they run out of memory, as compiled ones are.

    Args:
        pipeline: Has `_vae_modules`, a list of attribute paths; none is fine.
        rules: See `DecodePlan`.
    """
    for path in getattr(pipeline, "_vae_modules", None) or ():
        component: Any = resolve(pipeline, path)
        decode = getattr(component, "decode", None)
        if callable(decode) and not isinstance(decode, ChosenDecode):
            component.decode = ChosenDecode(decode, None, rules(path), component)


def _keep_out_tiling(component: Any) -> None:
    """Compile what decodes one tile, and not the loop over tiles.

    Torch unrolls a loop: decode of 36 tiles would be a graph 82 times as large as that of one, compiled once more for
    every number of tiles. Tiling may be switched on later, so this does not ask whether it is on.
    """
    for name in (*_TILE_LOOPS, *_TILE_SEAMS):
        method = getattr(component, name, None)
        if callable(method) and not isinstance(method, _Untraced):
            setattr(component, name, _Untraced(method, trace_inside=name in _TILE_LOOPS))


class _Untraced:
    """Calls a method where Dynamo breaks the graph.

    Args:
        method: Bound to the component.
        trace_inside: Whether what the method calls is compiled. The loop itself is not, since it calls the seams inside
            of a `for`: torch runs such a function as it is.
    """

    def __init__(self, method: Callable[..., Any], *, trace_inside: bool) -> None:
        functools.update_wrapper(self, method)
        self._method = method
        disable: Callable[..., Any] = torch.compiler.disable
        self._call = disable(method, recursive=not trace_inside)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is the method of the copied component, as with a compiled decode."""
        return itself, (self._method,)


def _compile_decode(
    component: Any,
    make: Callable[..., tuple[Any, bool]],
    plan: DecodePlan,
    path: str,
) -> tuple[State, str]:
    decode = getattr(component, "decode", None)
    if not callable(decode):
        return "left alone", f"{type(component).__name__} has no decode()"
    if isinstance(decode, ChosenDecode):
        return "compiled", ""
    shared, rules = None, plan.rules(path)
    if plan.static_options is None:
        shared, activated = make(decode, **plan.options)
        if not activated:
            return "set-up failed", ""
    else:
        rules = replace(rules, static=functools.partial(_static, make, decode, plan.static_options))
    component.decode = ChosenDecode(decode, shared, rules, component)
    _keep_out_tiling(component)
    return "compiled", _NOT_CHUNKS if hasattr(component, "decode_with_chunks") else ""


def _static(
    make: Callable[..., tuple[Any, bool]], decode: Callable[..., Any], options: Mapping[str, Any]
) -> Any | None:
    """Make a compiled decode for one shape, with a fallback of its own; None if it cannot be set up."""
    compiled, activated = make(decode, **options)
    return compiled if activated else None
