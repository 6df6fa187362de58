"""Tiled and sliced VAE decode, compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.compose.engine import MARKS, Engine, assert_same

pytestmark = MARKS

SIZES = (256, 512, 640, 256)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"vae_use_slicing": True}, id="slicing"),
        pytest.param({"vae_use_tiling": True}, id="tiling"),
    ],
)
def test_decode_is_compiled(klein: Path, options: dict[str, Any]) -> None:
    drawn: dict[bool, list[np.ndarray]] = {}
    for compiled in (False, True):
        with Engine(klein, compiled=compiled, diffusion_compile_vae=True, **options) as engine:
            warm = engine.graphs
            drawn[compiled] = [engine.draw(size=size, steps=1) for size in SIZES]
            if compiled:
                assert engine.worker.diffusion_compile_facts()["decode_graphs"] > 0
                assert engine.worker.diffusion_compile_facts()["decodes"] == 1, "decode fell back"
                assert engine.graphs == warm, "compiled more after warmup"
    assert_same(drawn[True], drawn[False])
