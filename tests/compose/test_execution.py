"""Step execution and batches of requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.compose.engine import MARKS, Engine, assert_same, film

pytestmark = MARKS

# Requests of one batch run through the transformer together, however many they are.
REQUESTS: tuple[dict[str, Any], ...] = ({"seed": 1}, {"seed": 2}, {"seed": 3, "steps": 6}, {"seed": 1})


def _filmed(engine: Engine, requests: tuple[dict[str, Any], ...] = REQUESTS) -> list[np.ndarray]:
    answers = engine.together([engine.request(**film(**request)) for request in requests])
    assert all(answer is not None for answer in answers)
    return [answer for answer in answers if answer is not None]


@pytest.fixture(scope="module")
def whole(h3: Path) -> list[np.ndarray]:
    """What requests film that run as a whole, eagerly."""
    with Engine(h3, compiled=False) as engine:
        return _filmed(engine)


@pytest.mark.parametrize("options", [pytest.param({}, id="alone"), pytest.param({"max_num_seqs": 2}, id="in-batches")])
def test_steps_are_compiled(h3: Path, whole: list[np.ndarray], options: dict[str, Any]) -> None:
    with Engine(h3, compiled=True, step_execution=True, **options) as engine:
        assert_same(_filmed(engine), whole)
        warm = engine.graphs
        assert warm > 0
        for _ in range(3):
            assert_same(_filmed(engine), whole)
        assert engine.graphs == warm, "batches of a size that was seen compiled more"


def test_requests_of_a_batch_are_compiled_together(qwen_image: Path) -> None:
    seeds = (1, 2, 3, 4)
    with Engine(qwen_image, compiled=False) as engine:
        alone = [engine.draw(seed=seed) for seed in seeds]
    with Engine(qwen_image, compiled=True, max_num_seqs=2, request_batch_max_wait_ms=2000.0) as engine:
        calls = engine.count_block_calls()

        def drawn() -> list[np.ndarray | None]:
            calls.clear()
            return engine.together([engine.request(seed=seed) for seed in seeds])

        for _ in range(2):  # two batches of two, or other batches where one had to wait for longer
            drawn()
        warm = engine.graphs
        assert warm > 0
        together = drawn()
        assert_same([picture for picture in together if picture is not None], alone)
        assert calls.total() < len(seeds) * 4 * len(engine.blocks), "no two requests ran together"
        assert engine.graphs == warm, "batches of a size that was seen compiled more"
