"""Which floats are constants of a graph: how often something is traced and compiled tells."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from vllm_omni_diffusion_compile.compile.events import record_compilations
from vllm_omni_diffusion_compile.compile.fallback import FallbackCallable
from vllm_omni_diffusion_compile.compile.latch import Latch
from vllm_omni_diffusion_compile.compile.numbers import NUMBERS, Numbers
from vllm_omni_diffusion_compile.compile.ranks import graph_compiler
from vllm_omni_diffusion_compile.compile.scope import compile_component
from vllm_omni_diffusion_compile.compile.state import State

X = torch.tensor([[-2.0, 3.0]])


class Sloped(nn.Module):
    """An operator that wants a plain number, as attention wants its scale."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = 0.5

    def forward(self, x: torch.Tensor, factor: float | None = None) -> torch.Tensor:
        y = torch.nn.functional.leaky_relu(x, self.slope)
        return y if factor is None else y * factor


class Traced:
    """Counts how often torch hands a graph over: once each time that it has traced it."""

    def __init__(self) -> None:
        self.times = 0
        self._compile = graph_compiler("aot_eager", None)

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.times += 1
        return self._compile(graph, inputs)


class Protect:
    def __init__(self, backend: Traced) -> None:
        self._backend = backend

    def compile_options(self, region: str) -> Mapping[str, Any]:
        return {"backend": self._backend, "dynamic": True}

    def __call__(
        self, eager: Callable[..., Any], compiled: Callable[..., Any], region: str, state: State
    ) -> FallbackCallable:
        def on_compile(frames: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
            return record_compilations("transformer", region, frames, args, kwargs)

        latch = Latch(region, lambda failure: pytest.fail(str(failure)))
        return FallbackCallable(eager, compiled, latch, on_compile=on_compile, state=state)


@pytest.fixture(autouse=True)
def _as_in_a_new_process() -> Iterator[None]:
    torch.compiler.reset()
    vars(NUMBERS).update(vars(Numbers()))
    yield
    vars(NUMBERS).update(vars(Numbers()))
    torch.compiler.reset()


def compiled(model: nn.Module) -> Traced:
    backend = Traced()
    outcome = compile_component(model, "transformer", scope="full", protect=Protect(backend), infer=False)
    assert outcome.regions, outcome.reason
    return backend


@torch.no_grad()
def test_a_number_of_a_module_costs_no_second_trace() -> None:
    model = Sloped()
    backend = compiled(model)
    torch.testing.assert_close(model(X), torch.tensor([[-1.0, 3.0]]))
    assert backend.times == 1
    assert not torch._dynamo.config.specialize_float


@torch.no_grad()
def test_a_number_of_a_module_that_changes_is_a_variable_from_then_on() -> None:
    class Scaled(nn.Module):
        scale = 2.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    model = Scaled()
    backend = compiled(model)
    for scale in (2.0, 3.0, 4.5, 1e-7, 6.0):
        model.scale = scale
        torch.testing.assert_close(model(X), X * scale)
    # Two constants, and one graph for all others.
    assert backend.times == 3


@torch.no_grad()
def test_what_is_compiled_again_and_again_may_have_a_number_behind_it() -> None:
    for _ in range(2):
        NUMBERS.look_at_reason("0/0: x is not None", "transformer Block")
    assert NUMBERS.constant
    NUMBERS.look_at_reason("0/0: x is not None", "transformer Other")
    assert NUMBERS.constant
    NUMBERS.look_at_reason("0/1: x is not None", "transformer Block")
    assert not NUMBERS.constant


@torch.no_grad()
def test_a_number_that_is_an_argument_is_never_a_constant() -> None:
    class Guided(nn.Module):
        def forward(self, x: torch.Tensor, guidance: float) -> torch.Tensor:
            return x * guidance

    model = Guided()
    backend = compiled(model)
    for guidance in (3.5, 4.0, 1.0):
        torch.testing.assert_close(model(X, guidance), X * guidance)
    assert backend.times == 1


@torch.no_grad()
def test_a_number_that_comes_with_a_later_call_costs_one_graph_more() -> None:
    model = Sloped()
    backend = compiled(model)
    assert model(X) is not None
    for factor in (2.0, 3.0, 4.0):
        torch.testing.assert_close(model(X, factor), factor * torch.tensor([[-1.0, 3.0]]))
    # The third of them, with a variable, is traced twice: the slope has to be a constant.
    assert backend.times == 4
