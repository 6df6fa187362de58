"""What compiles the graphs of several ranks: what it must not take for a failure."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_omni_diffusion_compile.compile.fallback import FallbackCallable
from vllm_omni_diffusion_compile.compile.latch import Failure, Latch
from vllm_omni_diffusion_compile.compile.ranks import GuardedBackend, graph_compiler
from vllm_omni_diffusion_compile.compile.state import ArgumentState


def test_what_eager_cannot_do_either_is_not_the_compilers_fault() -> None:
    torch.compiler.reset()
    failures: list[Failure] = []
    short_of_memory = True

    def backend(graph: Any, inputs: Any) -> Any:
        raise torch.OutOfMemoryError("while tuning")

    @torch.library.custom_op("guarded_backend::large", mutates_args=())
    def large(x: torch.Tensor) -> torch.Tensor:
        if short_of_memory:
            raise torch.OutOfMemoryError("eager")
        return x.clone()

    large.register_fake(torch.empty_like)

    def block(x: torch.Tensor) -> Any:
        return large(x) + 1

    alone: Any = SimpleNamespace(
        sent=lambda: (0, 0), may_have_communicated=lambda *_, **__: False, graphs_run=0, rank=0
    )
    latch = Latch("transformer Block", failures.append)
    compiled = torch.compile(block, backend=GuardedBackend(backend, alone, latch))
    call = FallbackCallable(block, compiled, latch, state=ArgumentState(), ranks=alone)
    with pytest.raises(torch.OutOfMemoryError, match="eager"):
        call(torch.ones(2))
    assert not latch.closed
    short_of_memory = False
    torch.testing.assert_close(call(torch.ones(2)), torch.full((2,), 2.0))
    assert [failure.reason for failure in failures] == ["while tuning"]


def test_a_number_that_has_to_be_a_constant_is_no_failure() -> None:
    """Torch raises out of the backend to have Dynamo trace again: operators of attention take a scale, for one."""
    torch.compiler.reset()  # another test may have had floats taken as constants
    failures: list[Failure] = []
    graphs: list[Any] = []
    aot_eager = graph_compiler("aot_eager", None)

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    alone: Any = SimpleNamespace(sent=lambda: (0, 0), graphs_run=0)
    guarded = GuardedBackend(backend, alone, Latch("transformer Block", failures.append))

    def block(x: torch.Tensor, slope: float) -> torch.Tensor:
        return torch.nn.functional.leaky_relu(x, slope)

    compiled: Any = torch.compile(block, backend=guarded, dynamic=True)
    x = torch.tensor([-2.0, 3.0])
    torch.testing.assert_close(compiled(x, 0.5), torch.tensor([-1.0, 3.0]))
    assert not failures
    assert len(graphs) == 2, "torch did not trace again, so that nothing was tested"
