"""VAE decode: which components of a pipeline have one, and putting the compiled one in its place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from vllm_omni_diffusion_compile.compile.components import resolve
from vllm_omni_diffusion_compile.compile.fallback import FallbackCallable

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


def compile_decodes(
    pipeline: Any,
    compile_callable: Callable[..., tuple[Callable[..., Any], bool]],
    *,
    left_alone: Mapping[str, str],
    options: Mapping[str, Any] = COMPILE_OPTIONS,
) -> list[DecodeOutcome]:
    """Compile `decode` of every component that a pipeline declares in `_vae_modules`.

    Args:
        pipeline: Has `_vae_modules`, a list of attribute paths; none is fine.
        compile_callable: `(function, label=..., **options) -> (callable, activated)`.
        left_alone: Paths not to compile (`*` for all), with the reason.
        options: Handed to `compile_callable`.

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
        state, reason = _compile_decode(components[identity], path, compile_callable, left_alone, options)
        outcomes.append(DecodeOutcome(path=path, state=state, reason=reason, also=tuple(also)))
    return outcomes


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
        return _itself, (self._method,)


def _itself(value: Any) -> Any:
    return value


def _compile_decode(
    component: Any,
    path: str,
    compile_callable: Callable[..., tuple[Callable[..., Any], bool]],
    left_alone: Mapping[str, str],
    options: Mapping[str, Any],
) -> tuple[State, str]:
    decode = getattr(component, "decode", None)
    reason = left_alone.get(path) or left_alone.get("*")
    if reason:
        return "left alone", reason
    if not callable(decode):
        return "left alone", f"{type(component).__name__} has no decode()"
    if isinstance(decode, FallbackCallable):
        return "compiled", ""
    compiled, activated = compile_callable(decode, label=f"{path}.decode", **options)
    if not activated:
        return "set-up failed", ""
    component.decode = compiled
    _keep_out_tiling(component)
    return "compiled", _NOT_CHUNKS if hasattr(component, "decode_with_chunks") else ""
