"""VAE decode: which components of a pipeline have one, and putting the compiled one in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vllm_omni_diffusion_compile.compile.fallback import FallbackCallable

# The whole decode as one graph where that is possible. `dynamic=None`: the first size is compiled as it is, the second
# one as dynamic, and later sizes are free.
COMPILE_OPTIONS: Mapping[str, Any] = {"mode": "default", "fullgraph": False, "dynamic": None}

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
) -> list[DecodeOutcome]:
    """Compile `decode` of every component that a pipeline declares in `_vae_modules`.

    Args:
        pipeline: Has `_vae_modules`, a list of attribute paths; none is fine.
        compile_callable: `(function, label=..., **options) -> (callable, activated)`.
        left_alone: Paths not to compile (`*` for all), with the reason.

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
        state, reason = _compile_decode(components[identity], path, compile_callable, left_alone)
        outcomes.append(DecodeOutcome(path=path, state=state, reason=reason, also=tuple(also)))
    return outcomes


def _compile_decode(
    component: Any,
    path: str,
    compile_callable: Callable[..., tuple[Callable[..., Any], bool]],
    left_alone: Mapping[str, str],
) -> tuple[State, str]:
    decode = getattr(component, "decode", None)
    reason = left_alone.get(path) or left_alone.get("*")
    if reason:
        return "left alone", reason
    if not callable(decode):
        return "left alone", f"{type(component).__name__} has no decode()"
    if isinstance(decode, FallbackCallable):
        return "compiled", ""
    compiled, activated = compile_callable(decode, label=f"{path}.decode", **COMPILE_OPTIONS)
    if not activated:
        return "set-up failed", ""
    component.decode = compiled
    return "compiled", _NOT_CHUNKS if hasattr(component, "decode_with_chunks") else ""


def resolve(pipeline: Any, path: str) -> Any | None:
    """Follow a dotted attribute path; None where it ends early."""
    found = pipeline
    for part in path.split("."):
        found = getattr(found, part, None)
        if found is None:
            return None
    return found
