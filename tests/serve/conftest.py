"""Checkpoints for the servers under test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.tiny_checkpoints.checkpoint import made


@pytest.fixture(scope="session")
def klein() -> Path:
    """Flux2-Klein: images."""
    return made("klein")


@pytest.fixture(scope="session")
def h3() -> Path:
    """MiniMax-H3, FL2VA partition: video with sound."""
    return made("minimax_h3") / "FL2VA"
