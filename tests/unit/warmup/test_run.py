"""Which warmup requests follow one another, and when it is enough."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_diffusion_compile.warmup.plan import FIRST, FURTHER, Size
from vllm_omni_diffusion_compile.warmup.run import CompileFacts, first_request, further_requests


class Stage:
    """A stage whose decode compiles the given numbers of graphs, request by request, and which refuses some steps."""

    def __init__(self, decode_graphs: list[int], refuses: frozenset[int] = frozenset(), decodes: int = 1) -> None:
        self.pending = list(decode_graphs)
        self.refuses = refuses
        self.decodes = decodes
        self.graphs = 0
        self.sent: list[tuple[Size, int]] = []

    def send(self, size: Size, steps: int) -> str | None:
        self.sent.append((size, steps))
        if steps in self.refuses:
            return "refused"
        self.graphs += self.pending.pop(0) if self.pending else 0
        return None

    def ask(self) -> CompileFacts | None:
        return CompileFacts(graphs=self.graphs, decodes=self.decodes, decode_graphs=self.graphs)


def test_one_step_is_enough_when_it_is_taken() -> None:
    stage = Stage([3])
    (warmed,) = first_request(stage.send, stage.ask, dummy_steps=2)
    assert stage.sent == [(FIRST, 1)]
    assert (warmed.error, warmed.graphs, warmed.decode_graphs) == (None, 3, 3)


@pytest.mark.parametrize(("dummy_steps", "sent"), [(2, [1, 2]), (1, [1])])
def test_a_refused_step_is_tried_as_the_dummy_run_does(dummy_steps: int, sent: list[int]) -> None:
    stage = Stage([], refuses=frozenset({1}))
    warmed = list(first_request(stage.send, stage.ask, dummy_steps))
    assert [steps for _, steps in stage.sent] == sent
    assert warmed[0].error == "refused"


@given(st.lists(st.integers(min_value=0, max_value=3), max_size=8))
def test_sizes_stop_at_the_first_that_compiles_nothing(decode_graphs: list[int]) -> None:
    stage = Stage(decode_graphs)
    list(further_requests(stage.send, stage.ask, steps=2))
    idle = (decode_graphs + [0] * len(FURTHER)).index(0)
    assert stage.sent == [(size, 2) for size in FURTHER[: idle + 1]]


def test_a_failed_size_is_the_last() -> None:
    stage = Stage([1, 1, 1], refuses=frozenset({2}))
    (warmed,) = further_requests(stage.send, stage.ask, steps=2)
    assert warmed.error == "refused"


def test_nothing_is_sent_for_a_decode_that_fell_back_or_cannot_be_asked() -> None:
    stage = Stage([1], decodes=0)
    assert list(further_requests(stage.send, stage.ask, 1)) == []
    assert list(further_requests(stage.send, lambda: None, 1)) == []
    assert stage.sent == []


def test_the_second_size_differs_in_both_dimensions_and_the_third_has_as_many_latent_rows() -> None:
    second, third, *_ = FURTHER
    assert second.width != FIRST.width and second.height != FIRST.height
    assert second.width * second.height == third.width * third.height
    assert second != third
    # The strides of all VAEs and patch sizes that the host knows divide 128.
    assert all(size.width % 128 == 0 and size.height % 128 == 0 for size in (FIRST, *FURTHER))
