"""Checkpoints for servers and engines under test, and which release is installed."""

from __future__ import annotations

from importlib.metadata import version
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


@pytest.fixture(scope="session")
def qwen_image() -> Path:
    """Qwen-Image, which runs several requests at once."""
    return made("qwen_image")


@pytest.fixture(scope="session")
def wan() -> Path:
    """Wan2.2: video."""
    return made("wan")


@pytest.fixture(scope="session")
def release() -> tuple[int, int]:
    """Major and minor version of the installed vLLM-Omni."""
    major, minor, *_ = version("vllm-omni").split(".")
    return int(major), int(minor)
