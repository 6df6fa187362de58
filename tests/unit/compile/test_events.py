"""What the compiler did, as facts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from vllm_omni_diffusion_compile.compile.events import LOG, CompileEvent, recorder, summarize
from vllm_omni_diffusion_compile.compile.fallback import FallbackCallable
from vllm_omni_diffusion_compile.compile.latch import Failure, Latch


@pytest.fixture(autouse=True)
def _empty_log() -> Iterator[None]:
    torch.compiler.reset()
    LOG.clear()
    yield
    LOG.clear()


def no_failure(failure: Failure) -> None:
    pytest.fail(f"fell back: {failure.error!r}")


def compiled(function: Callable[..., Any], **options: Any) -> FallbackCallable:
    return FallbackCallable(
        function,
        torch.compile(function, backend="eager", **options),
        Latch("transformer.Block", no_failure),
        on_compile=recorder("transformer", "Block"),
    )


def test_a_compilation_and_a_recompilation_say_what_shape_and_which_guard() -> None:
    call = compiled(lambda x, temb: x.sin() + temb, dynamic=False)
    call(torch.ones(2, 4), temb=torch.ones(4, dtype=torch.float64))
    call(torch.ones(2, 4), temb=torch.ones(4, dtype=torch.float64))
    LOG.ready = True
    call(torch.ones(3, 4), temb=torch.ones(4, dtype=torch.float64))
    first, second = LOG.since()[0]
    assert (first.kind, first.component, first.region) == ("compilation", "transformer", "Block")
    assert first.shapes == ("0: float32[2, 4]", "temb: float64[4]")
    assert first.seconds > 0 and not first.after_ready and not first.reason
    assert second.kind == "recompilation" and second.after_ready
    assert second.shapes[0] == "0: float32[3, 4]"
    assert "expected 2, actual 3" in second.reason
    assert call.graphs == 2


def test_reaching_the_recompile_limit_is_an_event_and_only_one() -> None:
    call = compiled(lambda x: x.sin(), dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2):
        for rows in range(2, 8):
            torch.testing.assert_close(call(torch.ones(rows)), torch.ones(rows).sin())
    assert [event.kind for event in LOG.since()[0]] == ["compilation", "recompilation", "recompile limit"]
    summary = summarize(LOG.since()[0])
    assert summary.limits == {("transformer", "Block"): 1}
    assert "transformer Block reached its recompile limit" in str(summary)


def test_many_compilations_are_all_recorded() -> None:
    # More than the 64 records that torch keeps.
    for number in range(70):
        compiled(eval(f"lambda x: x + {number}"))(torch.ones(2))
    assert len(LOG.since()[0]) == 70


def test_many_compilations_of_one_call_are_all_recorded() -> None:
    # As above: in full scope a component with many graph breaks has as many frames.
    steps = "\n".join(f"    x = x + {number}\n    torch._dynamo.graph_break()" for number in range(70))
    names: dict[str, Any] = {"torch": torch}
    exec(f"def broken(x):\n{steps}\n    return x", names)
    call = compiled(names["broken"])
    call(torch.ones(2))
    assert len(LOG.since()[0]) == call.graphs == 70


def test_a_graph_break_makes_two_graphs() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    call = compiled(broken)
    call(torch.ones(2))
    assert call.graphs == 2


def test_a_reader_gets_each_event_once() -> None:
    LOG.record("compilation", "vae", "decode", seconds=1.5)
    events, cursor = LOG.since()
    LOG.record("fallback", "vae", "decode", error="RuntimeError", reason="no g++")
    later, cursor = LOG.since(cursor)
    assert [event.kind for event in events] == ["compilation"]
    assert [event.kind for event in later] == ["fallback"]
    assert LOG.since(cursor)[0] == []
    assert [CompileEvent.from_dict(event.as_dict()) for event in events] == events


def test_a_summary_counts_by_region_and_names_what_fell_back() -> None:
    for _ in range(2):
        LOG.record("compilation", "transformer", "Block", seconds=1.25)
    LOG.record("recompilation", "vae", "decode", seconds=2.0)
    LOG.record("fallback", "vae", "decode", error="RuntimeError")
    assert str(summarize(LOG.since()[0])) == (
        "3 compilation(s) in 4.5 s (transformer Block 2, vae decode 1); vae decode is eager after a failure"
    )


def test_a_record_that_is_not_of_a_frame_does_not_hide_the_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run of a tuned Triton kernel leaves one behind that of the frame, as seen on an H200."""
    call = compiled(lambda x: x.sin())
    of_torch = torch._dynamo.utils.get_compilation_metrics
    nameless = torch._dynamo.utils.CompilationMetrics(is_forward=True, duration_us=54734)
    monkeypatch.setattr(torch._dynamo.utils, "get_compilation_metrics", lambda: [*of_torch(), nameless])
    call(torch.ones(2))
    assert [event.kind for event in LOG.since()[0]] == ["compilation"]
    assert call.graphs == 1
