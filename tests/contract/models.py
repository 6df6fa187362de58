"""Models of two blocks, in a pipeline that the installed model runner is asked to compile."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from vllm_omni.diffusion.worker.diffusion_model_runner import DiffusionModelRunner

X = torch.linspace(-1, 1, 8).reshape(2, 4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(x).sin()
        return result


class Undeclared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Declared(Undeclared):
    _repeated_blocks = ("Block",)


def pipeline_of(cls: type = nn.Module, **children: Any) -> Any:
    pipeline = cls()
    for name, child in children.items():
        setattr(pipeline, name, child)
    return pipeline


def load(pipeline: Any, *, scope: str = "regional", dynamic: bool = True, **config: Any) -> Any:
    """Compile a pipeline as `load_model` does after the weights are there; graphs run as Dynamo captured them."""
    runner = object.__new__(DiffusionModelRunner)
    runner.pipeline = pipeline
    runner.od_config = SimpleNamespace(
        enforce_eager=False,
        diffusion_compile_granularity=scope,
        diffusion_compile_dynamic=dynamic,
        diffusion_compile_vae=True,
        diffusion_compile_config={"backend": "eager"} | config,
    )
    for attribute in getattr(pipeline, "_dit_modules", None) or ("transformer", "transformer_2"):
        runner._compile_transformer(attribute)
    return runner


@torch.no_grad()
def run(model: Callable[..., torch.Tensor]) -> torch.Tensor:
    return model(X)
