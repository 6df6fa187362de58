"""Offload of weights: its hooks stay outside of what is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.compose.engine import MARKS, Engine, assert_same, compiled_files, parameters

pytestmark = MARKS

CPU = {"enable_cpu_offload": True}
LAYERWISE = {"enable_layerwise_offload": True}
DISTRIBUTED = {"enable_distributed_layerwise_offload": True}
REQUESTS: Sequence[dict[str, Any]] = ({}, {"size": 192}, {"guidance_scale": 4.0}, {})


@pytest.fixture(scope="module")
def eager(klein: Path) -> list[np.ndarray]:
    """What a server without offload draws, eagerly; offload moves weights and changes no arithmetic."""
    with Engine(klein, compiled=False) as engine:
        return [engine.draw(**request) for request in REQUESTS]


@pytest.mark.parametrize(
    ("options", "hooked"),
    [
        pytest.param({}, False, id="none"),
        pytest.param(CPU, False, id="cpu"),
        pytest.param(LAYERWISE, True, id="layerwise"),
        pytest.param(DISTRIBUTED, True, id="distributed-allgather"),
        pytest.param(DISTRIBUTED | {"dlo_use_allgather": False}, True, id="distributed"),
    ],
)
def test_blocks_are_compiled_and_hooks_are_not(
    klein: Path, eager: list[np.ndarray], options: dict[str, Any], hooked: bool
) -> None:
    with Engine(klein, compiled=True, **options) as engine:
        warm = engine.graphs
        assert warm > 0
        assert_same([engine.draw(**request) for request in REQUESTS], eager)
        assert engine.graphs == warm, "compiled more after the dummy run"
        assert compiled_files() == {"flux2_klein_transformer.py"}
        for block in engine.blocks:
            assert hasattr(block, "_omni_original_forward") == hooked
            assert parameters(block.forward) == parameters(type(block).forward)[1:]
