"""How declared shapes are warmed: until nothing is compiled, within a budget, and a failure does not stop the rest."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_diffusion_compile.settings import Shape
from vllm_omni_diffusion_compile.warmup.declared import (
    FEW_STEPS,
    MOST_REQUESTS,
    Answer,
    Budget,
    Outcome,
    Timing,
    warm_shapes,
)

SMALL, LARGE, WIDE = (
    Shape(width=64, height=64),
    Shape(width=128, height=128),
    Shape(width=256, height=64),
)


class Stage:
    """A stage on a clock of its own: what a request of each shape compiles, time after time, and what that costs.

    Args:
        graphs: By shape, the graphs that its requests compile one after the other; then none.
        compile_s: Seconds for one graph.
        run_s: Seconds for a request beside that.
        hangs: A shape whose requests never end.
        answer: Anything else that a request is answered.
    """

    def __init__(
        self,
        graphs: dict[str, list[int]] | None = None,
        *,
        compile_s: float = 10.0,
        run_s: float = 1.0,
        hangs: Shape | None = None,
        answer: Callable[[Shape, int | None], Answer | None] = lambda shape, steps: None,
    ) -> None:
        self.graphs = {name: list(counts) for name, counts in (graphs or {}).items()}
        self.compile_s = compile_s
        self.run_s = run_s
        self.hangs = hangs
        self.answer = answer
        self.now = 0.0
        self.sent: list[tuple[Shape, int | None]] = []

    def clock(self) -> float:
        return self.now

    def send(self, shape: Shape, steps: int | None, timeout_s: float | None) -> Answer:
        self.sent.append((shape, steps))
        if shape is self.hangs:
            assert timeout_s is not None, "the start would hang"
            self.now += timeout_s
            return Answer(gave_up=True)
        other = self.answer(shape, steps)
        if other is not None:
            self.now += self.run_s
            return other
        pending = self.graphs.get(str(shape), [])
        graphs = pending.pop(0) if pending else 0
        seconds = graphs * self.compile_s
        self.now += seconds + self.run_s
        return Answer(graphs=graphs, compile_events=graphs, compile_s=seconds, execution_s=seconds + self.run_s)

    def warm(self, *shapes: Shape, budget_s: float | None = None) -> list[Outcome]:
        # The duration of a request is taken from the same clock.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("vllm_omni_diffusion_compile.warmup.declared.time.perf_counter", self.clock)
            return list(warm_shapes(shapes, self.send, Budget(budget_s, self.clock)))


def test_a_shape_is_asked_for_until_it_compiles_nothing() -> None:
    stage = Stage({str(SMALL): [2, 1]})
    (outcome,) = stage.warm(SMALL)
    assert outcome.state == "warm"
    assert (outcome.requests, outcome.compile_events, outcome.compile_s) == (3, 3, 30.0)
    assert outcome.cold is not None and outcome.warm is not None
    assert (outcome.cold.total_s, outcome.cold.execution_s, outcome.warm.total_s) == (21.0, 1.0, 1.0)


@given(st.lists(st.integers(min_value=0, max_value=3), max_size=10))
def test_a_shape_that_never_settles_is_bounded_and_said(graphs: list[int]) -> None:
    stage = Stage({str(SMALL): list(graphs)})
    (outcome,) = stage.warm(SMALL)
    assert len(stage.sent) <= MOST_REQUESTS + 1
    # Of a shape that is called warm, the last request compiled nothing.
    assert outcome.state == ("warm" if (graphs + [0] * 10)[len(stage.sent) - 1] == 0 else "unsettled")


def test_few_steps_and_the_models_own_number_if_those_are_refused() -> None:
    def refuse(shape: Shape, steps: int | None) -> Answer | None:
        return Answer(error="schedule has 4 steps") if steps == FEW_STEPS else None

    stage = Stage(answer=refuse)
    (outcome,) = stage.warm(SMALL)
    assert [steps for _, steps in stage.sent] == [FEW_STEPS, None]
    assert outcome.state == "warm"


def test_steps_that_are_stated_are_kept() -> None:
    stage = Stage(answer=lambda shape, steps: Answer(error="no"))
    shape = Shape(width=64, height=64, steps=8)
    (outcome,) = stage.warm(shape)
    assert stage.sent == [(shape, 8)]
    assert (outcome.state, outcome.reason) == ("failed", "no")


def test_a_shape_without_memory_is_reported_and_the_rest_goes_on() -> None:
    def answer(shape: Shape, steps: int | None) -> Answer | None:
        return Answer(error="OutOfMemoryError: 80 GiB") if shape is LARGE else None

    stage = Stage(answer=answer)
    outcomes = stage.warm(SMALL, LARGE, WIDE)
    assert [outcome.state for outcome in outcomes] == ["warm", "failed", "warm"]
    assert "OutOfMemoryError" in outcomes[1].reason
    # What did not fit with few steps is not tried with the model's own number of them.
    assert [shape for shape, _ in stage.sent].count(LARGE) == 1


def test_what_would_not_fit_into_the_budget_is_skipped_before_it_starts() -> None:
    stage = Stage({str(SMALL): [3], str(LARGE): [3], str(WIDE): [3]})
    outcomes = stage.warm(SMALL, LARGE, WIDE, budget_s=40.0)
    # 32 s are spent; as much compiling again takes 30.
    assert [outcome.state for outcome in outcomes] == ["warm", "skipped", "skipped"]
    assert "8 s of 40 s are left" in outcomes[1].reason
    assert stage.now <= 40.0


def test_shapes_that_need_no_compiling_are_not_expected_to_take_what_the_first_took() -> None:
    # With dynamic shapes the first one compiles for all.
    outcomes = Stage({str(SMALL): [3]}).warm(SMALL, LARGE, WIDE, budget_s=70.0)
    assert [outcome.state for outcome in outcomes] == ["warm"] * 3


def test_a_shape_that_hangs_is_given_up_with_the_budget_and_nothing_follows() -> None:
    stage = Stage(hangs=LARGE)
    outcomes = stage.warm(SMALL, LARGE, WIDE, budget_s=60.0)
    assert [outcome.state for outcome in outcomes] == ["warm", "gave up", "skipped"]
    assert stage.now == 60.0
    assert "still busy with 128x128" in outcomes[2].reason
    assert not outcomes[1].succeeded


def test_a_spent_budget_costs_the_second_request_and_says_that_nothing_shows_that_it_is_warm() -> None:
    outcomes = Stage({str(SMALL): [1, 0]}, run_s=10.0).warm(SMALL, budget_s=25.0)
    assert (outcomes[0].state, outcomes[0].requests) == ("unsettled", 1)
    assert "no time" in outcomes[0].reason


def test_a_server_that_was_told_to_stop_warms_nothing_more() -> None:
    stage = Stage()
    outcomes = list(warm_shapes([SMALL, LARGE], stage.send, Budget(None), stop=lambda: len(stage.sent) >= 1))
    assert len(stage.sent) == 1
    assert outcomes[1].state == "skipped" and "told to stop" in outcomes[1].reason


def test_an_outcome_is_plain_data() -> None:
    shape = Shape(width=64, height=64, images=["320x320"], extra_args={"task": "ref2va"})
    (outcome,) = Stage({str(shape): [1]}).warm(shape)
    data = json.loads(json.dumps(outcome.as_dict()))
    assert data["shape"] == {"width": 64, "height": 64, "images": ["320x320"], "extra_args": {"task": "ref2va"}}
    assert data["cold"]["compile_s"] == 10.0


def test_the_compilers_share_is_taken_out_of_the_execution() -> None:
    timing = Timing.of(Answer(execution_s=12.0, compile_s=10.0, preparation_s=0.5, transport_s=0.25), 12.75)
    assert (timing.preparation_s, timing.compile_s, timing.execution_s, timing.transport_s) == (0.5, 10.0, 2.0, 0.25)
