"""What the figures were measured with: versions of what takes part, and the hardware."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from vllm_omni_diffusion_compile import __version__

_PACKAGES = ("vllm-omni", "torch", "triton", "diffusers", "transformers")
_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")


def versions() -> dict[str, str]:
    """Return versions by the name of the distribution; vLLM's has several."""
    found = {"python": platform.python_version(), "vllm-omni-diffusion-compile": __version__}
    for name in (*_PACKAGES, *metadata.packages_distributions().get("vllm", ())):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def hardware() -> dict[str, Any]:
    """Return what the machine is; `gpus` is empty where there is no NVIDIA driver."""
    return {
        "system": platform.platform(),
        "cpu": _cpu(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": _gpus(),
    }


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpus() -> list[str]:
    try:
        asked = subprocess.run(_QUERY, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in asked.stdout.splitlines() if line.strip()]
