"""Setting a component up to be compiled, and what becomes of it when the compiler fails."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from vllm_omni_diffusion_compile.compile.fallback import FallbackCallable
from vllm_omni_diffusion_compile.compile.latch import Failure, Latch
from vllm_omni_diffusion_compile.compile.scope import Scope, ScopeOutcome, compile_component
from vllm_omni_diffusion_compile.compile.state import State


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden_states: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        result: torch.Tensor = self.linear(hidden_states).sin() * scale
        return result


class Model(nn.Module):
    _repeated_blocks: tuple[str, ...] = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x


class Undeclared(Model):
    _repeated_blocks: tuple[str, ...] = ()


class Backend:
    """Counts the graphs it compiles, and fails from the given call of a compiled graph on."""

    def __init__(self, *, compile_error: Exception | None = None, fails_at: int | None = None) -> None:
        self.graphs = self.calls = 0
        self._compile_error = compile_error
        self._fails_at = fails_at

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        if self._compile_error is not None:
            raise self._compile_error
        self.graphs += 1

        def call(*args: Any) -> Any:
            self.calls += 1
            if self._fails_at is not None and self.calls >= self._fails_at:
                raise RuntimeError("kernel fault")
            return graph(*args)

        return call


class Protect:
    def __init__(self, backend: Backend, **options: Any) -> None:
        self.failures: list[tuple[str, Failure]] = []
        self._backend = backend
        self._options = options
        self._latches: dict[str, Latch] = {}

    def compile_options(self, region: str) -> Mapping[str, Any]:
        return {"backend": self._backend, "dynamic": False}

    def __call__(
        self, eager: Callable[..., Any], compiled: Callable[..., Any], region: str, state: State
    ) -> FallbackCallable:
        latch = self._latches.setdefault(region, Latch(region, lambda failure: self.failures.append((region, failure))))
        return FallbackCallable(eager, compiled, latch, state=state, **self._options)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch.compiler.reset()


X = torch.linspace(-1, 1, 8).reshape(2, 4)


def set_up(
    model: nn.Module, backend: Backend, scope: Scope = "regional", infer: bool = True, **options: Any
) -> tuple[ScopeOutcome, Protect]:
    protect = Protect(backend, **options)
    return compile_component(model, "transformer", scope=scope, protect=protect, infer=infer), protect


@torch.no_grad()
def run(model: nn.Module) -> torch.Tensor:
    result: torch.Tensor = model(X)
    return result


@pytest.mark.parametrize("model", [Model(), Undeclared()], ids=["declared", "inferred"])
def test_blocks_share_one_graph_and_give_what_eager_gives(model: Model) -> None:
    expected, backend = run(model), Backend()
    outcome, protect = set_up(model, backend)
    assert outcome.regions == {"Block": 3}
    torch.testing.assert_close(run(model), expected)
    assert (backend.graphs, backend.calls) == (1, 3)
    assert protect.failures == []


def test_full_scope_is_one_graph_and_gives_what_eager_gives() -> None:
    model, backend = Model(), Backend()
    expected = run(model)
    outcome, _ = set_up(model, backend, "full")
    assert outcome.regions == {"Model": 1}
    torch.testing.assert_close(run(model), expected)
    assert (backend.graphs, backend.calls) == (1, 1)


@pytest.mark.parametrize("scope", ["regional", "full"])
@pytest.mark.parametrize("fails_at", [1, 3, 100])
def test_a_backend_that_fails_at_any_call_costs_no_result_and_is_told_once(scope: Scope, fails_at: int) -> None:
    model, backend = Model(), Backend(fails_at=fails_at)
    expected = run(model)
    _, protect = set_up(model, backend, scope)
    for _ in range(101):
        torch.testing.assert_close(run(model), expected)
    ((region, failure),) = protect.failures
    assert region == ("Block" if scope == "regional" else "Model")
    assert str(failure.error) == "kernel fault"
    assert backend.calls == fails_at, "what failed once must not be called again"


@pytest.mark.parametrize("scope", ["regional", "full"])
def test_no_working_compiler_is_found_out_once(scope: Scope) -> None:
    model = Model()
    expected = run(model)
    _, protect = set_up(model, Backend(compile_error=RuntimeError("no g++")), scope)
    torch.testing.assert_close(run(model), expected)
    torch.testing.assert_close(run(model), expected)
    assert len(protect.failures) == 1


def test_failing_closed_raises_and_stays_compiled() -> None:
    model = Model()
    _, protect = set_up(model, Backend(fails_at=1), fails_closed=True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="kernel fault"):
            run(model)
    assert protect.failures == []


def test_an_error_of_the_model_itself_propagates_and_latches_nothing() -> None:
    model, backend = Model(), Backend()
    _, protect = set_up(model, backend)
    with pytest.raises((RuntimeError, TypeError), match="shape|size|mat1"):
        model(torch.ones(2, 5))
    assert protect.failures == []
    run(model)
    assert backend.graphs == 1


def test_setting_up_is_all_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, compiled = Model(), 0
    real = torch.compile

    def third_time_unlucky(function: Any, **options: Any) -> Any:
        nonlocal compiled
        compiled += 1
        if compiled == 3:
            raise RuntimeError("no such option")
        return real(function, **options)

    monkeypatch.setattr(torch, "compile", third_time_unlucky)
    outcome, _ = set_up(model, Backend())
    assert str(outcome.error) == "no such option"
    assert outcome.regions == {}
    assert not any("forward" in vars(block) for block in model.blocks)


def test_full_scope_that_cannot_be_set_up_leaves_the_component_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    monkeypatch.setattr(model, "compile", lambda **_: (_ for _ in ()).throw(RuntimeError("no such mode")))
    outcome, _ = set_up(model, Backend(), "full")
    assert str(outcome.error) == "no such mode"
    run(model)


def test_full_scope_of_a_list_is_all_of_it_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Model(), Model()
    monkeypatch.setattr(second, "compile", lambda **_: (_ for _ in ()).throw(RuntimeError("no such mode")))
    outcome, _ = set_up(nn.ModuleList([first, second]), Backend(), "full")
    assert str(outcome.error) == "no such mode"
    assert first._compiled_call_impl is None


def test_a_compiled_block_shows_the_parameters_of_its_forward() -> None:
    model = Model()
    expected = inspect.signature(model.blocks[0].forward)
    set_up(model, Backend())
    assert inspect.signature(model.blocks[0].forward) == expected
    assert expected.return_annotation in ("torch.Tensor", torch.Tensor)


def test_under_a_hook_the_original_forward_is_compiled_and_the_hook_stays_outside() -> None:
    model, backend = Model(), Backend()
    trips: list[bool] = []
    blocks: list[Any] = list(model.blocks)
    for block in blocks:
        block._omni_original_forward = block.forward
        reference = SimpleNamespace(original_forward=block.forward)
        block._hook_registry = SimpleNamespace(_hooks={"cache": SimpleNamespace(fn_ref=reference)})

        def dispatch(*args: Any, block: Any = block, **kwargs: Any) -> Any:
            trips.append(torch.compiler.is_compiling())
            return block._omni_original_forward(*args, **kwargs)

        block.forward = dispatch
    expected = run(model)
    set_up(model, backend)
    torch.testing.assert_close(run(model), expected)
    assert backend.calls == 3
    assert trips == [False] * 6
    for block in blocks:
        (hook,) = block._hook_registry._hooks.values()
        assert hook.fn_ref.original_forward is block._omni_original_forward


def test_blocks_of_a_component_inside_of_another_are_compiled_once() -> None:
    outer = nn.Module()
    outer.language_model = Undeclared()
    first, _ = set_up(outer.language_model, Backend())
    forward = outer.language_model.blocks[0].forward
    second, _ = set_up(outer, Backend())
    assert first.regions == {"Block": 3}
    assert second.regions == {}
    assert "another component" in second.reason
    assert outer.language_model.blocks[0].forward is forward


@pytest.mark.parametrize(
    ("model", "infer", "reason"),
    [
        (Undeclared(), False, "infer_regions is off"),
        (nn.Linear(4, 4), True, "most of it does not repeat"),
    ],
)
def test_a_component_without_regions_is_left_alone_with_the_reason(model: nn.Module, infer: bool, reason: str) -> None:
    outcome, _ = set_up(model, Backend(), infer=infer)
    assert outcome.regions == {}
    assert reason in outcome.reason


def test_a_declared_class_that_the_model_does_not_have_is_named() -> None:
    class Renamed(Model):
        _repeated_blocks: tuple[str, ...] = ("OldBlock",)

    outcome, _ = set_up(Renamed(), Backend())
    assert "OldBlock" in outcome.reason


def test_a_copy_of_a_compiled_component_is_eager() -> None:
    model = Model()
    set_up(model, Backend(fails_at=1))
    twin = copy.deepcopy(model)
    torch.testing.assert_close(run(twin), run(Model()))


@torch.no_grad()
@pytest.mark.parametrize("by_name", [False, True], ids=["positional", "by name"])
def test_latents_that_lie_in_another_way_share_the_graph_of_a_component(by_name: bool) -> None:
    """Of a whole transformer a second graph takes minutes; the first step of a request has a permuted view."""

    class Guided(Model):
        def forward(self, x: torch.Tensor, prompt: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(x if prompt is None else x + prompt)

    model, backend = Guided(), Backend()
    permuted = torch.linspace(-1, 1, 8).reshape(4, 2).T
    expected = model(permuted)
    set_up(model, backend, "full")
    for x in (X, permuted, permuted.contiguous()):
        result = model(prompt=None, x=x) if by_name else model(x)
        if x is not X:
            torch.testing.assert_close(result, expected)
    assert backend.graphs == 1
    assert not permuted.is_contiguous()
