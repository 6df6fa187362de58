"""Two ranks, each a process of its own, that talk through gloo."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.compose.engine import MARKS, Engine, assert_same

pytestmark = [*MARKS, pytest.mark.slow]

REQUESTS: tuple[Mapping[str, Any], ...] = ({}, {"size": 192}, {"guidance_scale": 4.0}, {})
RANKS = {"worker_extension_cls": "tests.compose.ranks.RankFacts"}
DISTRIBUTED = {"enable_distributed_layerwise_offload": True}


@pytest.fixture(scope="module", autouse=True)
def processes() -> Iterator[None]:
    """How `vllm serve` starts processes; the host asks for it only after it has made what they share."""
    method = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    yield
    multiprocessing.set_start_method(method, force=True)


@pytest.fixture(scope="module")
def one_rank(klein: Path) -> list[np.ndarray]:
    """What one rank draws, eagerly."""
    with Engine(klein, compiled=False) as engine:
        return [engine.draw(**request) for request in REQUESTS]


@pytest.mark.parametrize(
    ("parallel", "options"),
    [
        pytest.param({"tensor_parallel_size": 2}, {}, id="tensor"),
        pytest.param({"ulysses_degree": 2}, {}, id="ulysses"),
        pytest.param({"cfg_parallel_size": 2}, {}, id="cfg"),
        pytest.param({"ulysses_degree": 2}, DISTRIBUTED, id="distributed-offload-allgather"),
        pytest.param({"ulysses_degree": 2}, DISTRIBUTED | {"dlo_use_allgather": False}, id="distributed-offload"),
    ],
)
def test_every_rank_compiles_and_draws_what_one_would(
    klein: Path, one_rank: list[np.ndarray], parallel: dict[str, Any], options: dict[str, Any]
) -> None:
    with Engine(klein, compiled=True, parallel_config=parallel, **RANKS, **options) as engine:
        engine.draw(guidance_scale=4.0)  # the dummy run has no guidance
        warm = engine.rank_graphs()
        assert len(warm) == 2 and min(warm) > 0
        assert_same([engine.draw(**request) for request in REQUESTS], one_rank)
        assert engine.rank_graphs() == warm, "compiled more for a shape"


def test_decode_in_patches_stays_eager(
    klein: Path, one_rank: list[np.ndarray], capfd: pytest.CaptureFixture[str]
) -> None:
    parallel = {"tensor_parallel_size": 2, "vae_patch_parallel_size": 2}
    with Engine(
        klein, compiled=True, parallel_config=parallel, vae_use_tiling=True, diffusion_compile_vae=True, **RANKS
    ) as engine:
        drawn = [engine.draw(**request) for request in REQUESTS]
        facts = engine.rank_facts()
    with Engine(klein, compiled=False, vae_use_tiling=True) as engine:
        assert_same(drawn, [engine.draw(**request) for request in REQUESTS])
    assert [fact["decodes"] for fact in facts] == [0, 0]
    said = capfd.readouterr()
    assert "runs collectives over 2 ranks" in said.out + said.err
