"""The mutable state through which vLLM-Omni tells a video VAE how its tiles are shared among ranks."""

from __future__ import annotations

from typing import Any

_STATE: dict[str, Any] = {}


def get_parallel_state() -> dict[str, Any]:
    """Return the one state of the process."""
    return _STATE
