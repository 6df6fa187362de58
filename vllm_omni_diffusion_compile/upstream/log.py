"""A logger that vLLM's own configuration reaches."""

from __future__ import annotations

from typing import Any


def host_logger(name: str) -> Any:
    """Return vLLM's logger for one of our modules; vLLM gives handlers only to loggers below `vllm`."""
    from vllm.logger import init_logger

    return init_logger(f"vllm.{name}")
