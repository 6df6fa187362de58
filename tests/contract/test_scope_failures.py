"""What catches the compiler's failures in the installed model runner: alone, with caches, on several ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._inductor.exc import CppCompileError
from vllm_omni.diffusion.cache.teacache import hook as teacache
from vllm_omni.diffusion.hooks import HookRegistry

from tests.contract.models import Block, Declared, Undeclared, X, load, pipeline_of, run
from vllm_omni_diffusion_compile.compile.events import LOG
from vllm_omni_diffusion_compile.compile.ranks import RankGroup
from vllm_omni_diffusion_compile.errors import RankFailedError
from vllm_omni_diffusion_compile.upstream import fallbacks, transformer

pytestmark = pytest.mark.contract


@pytest.mark.parametrize("scope", ["regional", "full"])
def test_a_failure_at_the_first_call_is_answered_eagerly_and_logged_once(
    scope: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = pipeline_of(transformer=Declared())
    expected = run(pipeline.transformer)
    load(pipeline, scope=scope, backend=f"{__name__}.broken_backend")
    torch.testing.assert_close(run(pipeline.transformer), expected)
    torch.testing.assert_close(run(pipeline.transformer), expected)
    (line,) = [record.getMessage() for record in caplog.records if "retrying eagerly" in record.getMessage()]
    assert f"transformer.{'Block' if scope == 'regional' else 'Declared'}: " in line
    assert "RuntimeError: no C++ compiler" in line and "second line" not in line


def broken_backend(graph: Any, inputs: Any) -> Any:
    raise RuntimeError("no C++ compiler\nsecond line")


class Another(Block):
    pass


class TwoKinds(Undeclared):
    _repeated_blocks = ("Block", "Another")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Another()])


def backend_of(compiler: str, *, raises: str = "") -> Callable[[Any, Any], Any]:
    """A backend that hands a compiler what it does not compile, or raises what Triton does."""

    def compile_graph(graph: Any, inputs: Any) -> Any:
        raise RuntimeError(raises) if raises else CppCompileError([compiler, "kernel.cpp"], "error: expected ';'")

    return compile_graph


@pytest.mark.parametrize(
    ("compiler", "raises", "works"),
    [
        ("g++", "", True),
        ("/usr/bin/false", "", False),
        ("", "Failed to find C compiler. Please specify via CC environment variable.", False),
    ],
    ids=["one kernel does not compile", "nothing compiles", "Triton has no compiler"],
)
def test_a_compiler_that_does_not_work_is_found_out_once(
    compiler: str, raises: str, works: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.broken_backend", backend_of(compiler, raises=raises))
    monkeypatch.setattr(fallbacks, "_latches", weakref.WeakSet())  # those of this pipeline alone
    LOG.clear()
    pipeline = pipeline_of(transformer=TwoKinds())
    expected = run(pipeline.transformer)
    load(pipeline, backend=f"{__name__}.broken_backend")
    torch.testing.assert_close(run(pipeline.transformer), expected)
    lines = [record.getMessage() for record in caplog.records if "retrying eagerly" in record.getMessage()]
    assert ["Nothing can be compiled on this machine" in line for line in lines] == ([False] * 2 if works else [True])
    assert sorted(event.region for event in LOG.since()[0] if event.kind == "fallback") == ["Another", "Block"]


class TeaCached(Undeclared):
    """A transformer that TeaCache decides for, step by step."""

    def __init__(self) -> None:
        super().__init__()
        config = SimpleNamespace(coefficients=[1.0, 0.0], transformer_type="", rel_l1_thresh=0.3)
        HookRegistry.get_or_create(self).register_hook("teacache", teacache.TeaCacheHook(config))


def extract(model: TeaCached, x: torch.Tensor) -> Any:
    """What TeaCache asks of each model that it knows."""
    return SimpleNamespace(
        modulated_input=x, hidden_states=x, encoder_hidden_states=None, extra_states=None,
        run_transformer_blocks=lambda: (Undeclared.forward(model, x),), postprocess=lambda output: output,
    )  # fmt: skip


class Steps:
    """Stands in for the context manager that Cache-DiT gives a transformer."""

    def __init__(self) -> None:
        self.contexts: dict[str, Steps] = {}
        self.executed: list[int] = []

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's own
    def begin(self) -> int:
        context = self.contexts.setdefault("blocks", Steps())
        context.executed.append(len(context.executed))
        return len(context.executed)


class CacheDiTCached(Undeclared):
    """A transformer that counts its steps in between its blocks, as Cache-DiT does."""

    def __init__(self) -> None:
        super().__init__()
        self._context_manager = Steps()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.blocks[0](x) * self._context_manager.begin()
        return super().forward(x) + self.calls


# Graphs that follow a break, in the first step or in a later one.
@pytest.mark.parametrize(("cached", "at"), [(TeaCached, 4), (CacheDiTCached, 2), (CacheDiTCached, 4)])
def test_a_failure_behind_a_graph_break_finds_what_caches_knew_before_the_call(
    cached: type[Undeclared], at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def steps(model: nn.Module) -> list[torch.Tensor]:
        with torch.no_grad():
            return [model(X * (1 + 0.2 * step)).clone() for step in range(6)]

    monkeypatch.setattr(teacache, "get_extractor", lambda _: extract)
    torch.manual_seed(0)
    expected = steps(cached())
    torch.manual_seed(0)
    pipeline = pipeline_of(transformer=cached())
    torch.compiler.reset()
    monkeypatch.setattr(FailsAt, "graphs_left", at)
    load(pipeline, scope="full", backend=f"{__name__}.FailsAt.backend")
    torch.testing.assert_close(steps(pipeline.transformer), expected)
    assert pipeline.transformer._compiled_call_impl.latched


class FailsAt:
    graphs_left = 0

    @classmethod
    def backend(cls, graph: Any, inputs: Any) -> Any:
        cls.graphs_left -= 1
        if not cls.graphs_left:
            raise RuntimeError("ptxas died")
        return graph.forward


def test_a_failure_is_raised_where_failures_are_to_be_raised() -> None:
    pipeline = pipeline_of(transformer=Declared())
    load(pipeline, backend=f"{__name__}.broken_backend", on_failure="raise")
    with pytest.raises(Exception, match=r"no C\+\+ compiler"):
        run(pipeline.transformer)


def test_where_ranks_run_it_together_what_is_raised_names_the_rank(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No rank raises before all have finished the request: the others would wait for it in their collectives."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        ranks = RankGroup(dist.new_group(backend="gloo"), fails_closed=True)
        monkeypatch.setattr(transformer, "_ranks", lambda *_: ranks)
        pipeline = pipeline_of(transformer=Declared())
        setattr(pipeline, transformer._RANKS, ranks)
        expected = run(pipeline.transformer)
        runner = load(pipeline, backend=f"{__name__}.broken_backend", on_failure="raise")
        finished: list[torch.Tensor] = []
        execute = transformer.agree_before(lambda self: finished.append(run(self.pipeline.transformer)))
        for _ in range(2):
            with pytest.raises(RankFailedError, match=r"rank 0: .*transformer.Block .*no C\+\+ compiler"):
                execute(runner)
    finally:
        dist.destroy_process_group()
    (only,) = finished
    torch.testing.assert_close(only, expected)
    assert "retrying eagerly" not in caplog.text
