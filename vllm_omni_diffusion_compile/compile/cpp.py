"""Whether a C++ compiler compiles anything."""

from __future__ import annotations

import subprocess
import sysconfig
import tempfile
from pathlib import Path

# What inductor's own C++ includes: the headers of Python and OpenMP are the ones that are missing in practice.
_LINE = """\
#include <Python.h>
#include <omp.h>
#include <cmath>
extern "C" double root(double x) { return omp_get_max_threads() * std::sqrt(x); }
"""
_FLAGS = ("-shared", "-fPIC", "-fopenmp", "-std=c++20")
_TIMEOUT_S = 60.0


def why_not(compiler: str) -> str:
    """Have a compiler compile a line, and return why it cannot; an empty text if it can."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "line.cpp")
            source.write_text(_LINE)
            include = sysconfig.get_paths()["include"]
            command = [compiler, *_FLAGS, f"-I{include}", str(source), "-o", str(Path(folder, "line.so"))]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()[:1]
    return "" if done.returncode == 0 else (errors or [f"it exits with {done.returncode}"])[0].strip()
