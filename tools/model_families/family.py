"""What one row of the table is: how to build a family's denoising component small, and what to call it with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

Inputs = Callable[[int, torch.dtype], Mapping[str, Any]]


def _call(component: Any, inputs: Mapping[str, Any]) -> Any:
    return component(**inputs)


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model family.

    Args:
        name: The folder below `vllm_omni/diffusion/models`.
        pipeline: A name in the host's registry. The stand-in pipeline takes the class's name and what the class
            declares (`_dit_modules`, `setup_compile`) from there.
        path: Where the pipeline keeps the component, dotted.
        build: Makes the component, given a stand-in for the transformer's configuration file to fill in. Runs under
            the host's own contexts with the data type as torch's default; the weights are filled afterwards.
        inputs: Keyword arguments of one call, for a size (1, 2 or 3; another size means other shapes) and a data type.
        config: The transformer's configuration file (`od_config.tf_model_config`).
        also: Other paths at which the pipeline keeps modules of the component.
        plain_parents: Whether the parents in `path` are no modules.
        dit_modules: Overrides what the class declares, where the real pipeline sets it per instance.
        call: How to call the component, where that is not its forward.
        dtypes: Data types that it runs in; some families cast to bf16 whatever they were loaded in.
        meta: Built without memory and only counted: its size cannot be configured.
        limits: What a reader has to know about this row.
    """

    name: str
    pipeline: str
    path: str = "transformer"
    build: Callable[[Any], Any]
    inputs: Inputs
    config: Mapping[str, Any] = field(default_factory=dict)
    also: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    plain_parents: bool = False
    dit_modules: tuple[str, ...] | None = None
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    meta: bool = False
    call: Callable[[Any, Mapping[str, Any]], Any] = _call
    limits: str = ""


@dataclass(frozen=True, kw_only=True)
class NotBuilt:
    """A family that the table cannot show, and why.

    Args:
        name: The folder below `vllm_omni/diffusion/models`.
        reason: Why it cannot be built small on CPU.
    """

    name: str
    reason: str


class Draw:
    """Random inputs of one call; the same ones for the same size, whatever the data type.

    Args:
        size: Seeds the numbers.
        dtype: Data type of what `normal` draws.
    """

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._generator = torch.Generator().manual_seed(size)

    def normal(self, *shape: int) -> torch.Tensor:
        """Standard normal numbers that bf16 can represent, so that every data type sees the same ones."""
        numbers = torch.randn(shape, generator=self._generator, dtype=torch.float32, device="cpu")
        return numbers.to(torch.bfloat16).to(torch.get_default_device(), self.dtype)

    def tokens(self, *shape: int, below: int) -> torch.Tensor:
        """Token ids."""
        ids = torch.randint(below, shape, generator=self._generator, device="cpu")
        return ids.to(torch.get_default_device())


def config(**values: Any) -> SimpleNamespace:
    """A configuration object of a model that reads plain attributes."""
    return SimpleNamespace(**values)
