"""How much memory this process holds and held."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import psutil

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
# "Reset the peak resident set size to the current one", proc_pid_clear_refs(5).
_RESET_PEAK = "5"


def resident_bytes() -> int:
    """Bytes of the process that are in memory now."""
    return int(psutil.Process().memory_info().rss)


def peak_bytes() -> int:
    """Most bytes that were in memory at once since `reset_peak`.

    Where the kernel does not say (no `/proc`, a sandbox), the peak since the process started.
    """
    try:
        status = _STATUS.read_text()
    except OSError:
        status = ""
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak() -> bool:
    """Start a new measurement; returns whether the kernel allows it."""
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:
        return False
    return True
