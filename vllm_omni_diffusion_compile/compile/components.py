"""Components of a pipeline by their declared paths, and by structure where none is declared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

# What a pipeline keeps beside the model that denoises: by the names that diffusers and vLLM-Omni give such parts.
_NOT_DENOISING = ("vae", "encoder", "tokenizer", "processor", "vocoder", "safety_checker", "scheduler", "vision", "vit")

_MISSING = object()

# Bookkeeping of nn.Module itself.
_MODULE_INTERNALS = frozenset(vars(nn.Module()))


def resolve(pipeline: Any, path: str) -> Any | None:
    """Follow a dotted attribute path; None where it ends early or ends in None."""
    found = pipeline
    for part in path.split("."):
        found = getattr(found, part, None)
        if found is None:
            return None
    return found


def missing_part(pipeline: Any, path: str) -> str | None:
    """Say which part of a dotted path nobody has.

    Returns:
        The first attribute that does not exist, with what it was looked for in; None if the path resolves, or if it
        ends in a None, which is how a pipeline says that it did not load an optional component.
    """
    found = pipeline
    for part in path.split("."):
        owner, found = found, getattr(found, part, _MISSING)
        if found is _MISSING:
            return f"{type(owner).__name__} has no attribute {part!r}"
        if found is None:
            return None
    return None


def denoising_modules(pipeline: Any, beside: Iterable[Any] = ()) -> Iterator[tuple[str, nn.Module]]:
    """Yield the submodules of a pipeline that may hold the model that denoises.

    Args:
        pipeline: A module, or any object that has modules among its attributes.
        beside: Its encoders and VAEs, as far as it declares them.

    Yields:
        Path and module, which may hold parts that are beside. An attribute that is no module is looked into once:
        GR00T's policy and the pipeline of diffusers that the adapter wraps hold modules, and are none.
    """
    others = {id(part) for part in beside}

    def denoises(name: str, part: Any) -> bool:
        return id(part) not in others and not is_beside(name)

    for name, child in _attributes(pipeline):
        if not denoises(name, child):
            continue
        if isinstance(child, nn.Module):
            yield name, child
        elif hasattr(child, "__dict__") and not isinstance(child, type):
            held = ((inner, module) for inner, module in _attributes(child) if isinstance(module, nn.Module))
            yield from ((f"{name}.{inner}", module) for inner, module in held if denoises(inner, module))


def _attributes(holder: Any) -> list[tuple[str, Any]]:
    plain = [(name, value) for name, value in vars(holder).items() if name not in _MODULE_INTERNALS]
    return [*(holder.named_children() if isinstance(holder, nn.Module) else ()), *plain]


def is_beside(name: str) -> bool:
    """Whether a part of a pipeline is by its name an encoder, a VAE or the like."""
    return any(word in name.lower() for word in _NOT_DENOISING)
