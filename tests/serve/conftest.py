"""Checkpoints for the servers under test."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def checkpoint(name: str) -> Path:
    """Return a tiny checkpoint's folder, made on first use."""
    out = ROOT / ".cache" / "checkpoints" / name
    subprocess.run([sys.executable, "-m", f"tools.tiny_checkpoints.{name}", str(out)], cwd=ROOT, check=True)
    return out


@pytest.fixture(scope="session")
def klein() -> Path:
    """Flux2-Klein: images."""
    return checkpoint("klein")


@pytest.fixture(scope="session")
def h3() -> Path:
    """MiniMax-H3, FL2VA partition: video with sound."""
    return checkpoint("minimax_h3") / "FL2VA"


@pytest.fixture(scope="session")
def wan() -> Path:
    """Wan2.2: video."""
    return checkpoint("wan")


@pytest.fixture(scope="session")
def release() -> tuple[int, int]:
    """Major and minor version of the installed vLLM-Omni."""
    major, minor, *_ = version("vllm-omni").split(".")
    return int(major), int(minor)
