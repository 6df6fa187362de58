"""Weights that change under a compiled model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.compose.engine import MARKS, SAME_PICTURE_DB, Engine, assert_same, psnr_db

pytestmark = MARKS


def _trained(checkpoint: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The transformer's weights as a trainer might hand them over: other values under the names of the checkpoint."""
    for file in sorted((checkpoint / "transformer").glob("*.safetensors")):
        for name, weight in load_file(file).items():
            yield f"transformer.{name}", weight * 1.5


def _update(engine: Engine, checkpoint: Path) -> None:
    with torch.no_grad():
        loaded = engine.pipeline.load_weights(_trained(checkpoint))
    assert loaded


@pytest.mark.parametrize("options", [pytest.param({}, id="resident")])
def test_an_update_of_weights_needs_no_compilation(klein: Path, options: dict[str, Any]) -> None:
    with Engine(klein, compiled=False) as engine:
        before = engine.draw()
        _update(engine, klein)
        after = engine.draw()
    assert psnr_db(before, after) < SAME_PICTURE_DB, "the update changed nothing"
    with Engine(klein, compiled=True, **options) as engine:
        assert_same([engine.draw()], [before])
        warm = engine.graphs
        assert warm > 0
        for _ in range(3):
            _update(engine, klein)
            assert_same([engine.draw()], [after])
        assert engine.graphs == warm, "an update of weights compiled more"
