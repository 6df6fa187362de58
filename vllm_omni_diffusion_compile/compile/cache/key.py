"""What a compiled artifact depends on."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

# What the C++ compiler is told to use with -march=native.
_CPU_FLAGS = ("flags", "Features")


@dataclass(frozen=True)
class CacheKey:
    """Facts that make an artifact wrong if they change, by name.

    Args:
        facts: Names and values, in words that a reader of `vllm-omni-compile cache list` understands.
    """

    facts: Mapping[str, str]

    @property
    def digest(self) -> str:
        """A short name for it, 16 hexadecimal digits; it also names the bundle's file."""
        text = json.dumps(dict(self.facts), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def machine_facts() -> dict[str, str]:
    """Return the facts of this process and this machine: Python, torch, its compilers, and the device."""
    version = torch.version
    return {
        "python": platform.python_version(),
        "system": f"{sys.platform} {platform.machine()} {' '.join(platform.libc_ver())}",
        "torch": f"{torch.__version__} {version.git_version}",
        "toolkit": f"cuda {version.cuda}" if version.cuda else f"hip {version.hip}" if version.hip else "none",
        "triton": _version("triton"),
        "cpu": _cpu(),
        "device": _device(),
    }


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "none"


def _cpu() -> str:
    """Name what the CPU can do: artifacts for one CPU may hold instructions that another one lacks."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(_CPU_FLAGS)), [])
    digest = hashlib.sha256(" ".join(sorted(flags)).encode()).hexdigest()[:8]
    return f"{torch.backends.cpu.get_cpu_capability()} {digest}"


def _device() -> str:
    if not torch.accelerator.is_available():
        return "cpu"
    kind = torch.accelerator.current_accelerator()
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return f"{properties.name} {properties.major}.{properties.minor}"
    return str(kind)
