"""What torch compiled, read from the trace that torch itself writes when TORCH_TRACE names a folder.

Every process of a server writes one file there, whichever plugins it loaded: stock and patched servers are counted in
the same way, and nothing of this package takes part. A record is a line of glog's form with a JSON object; a payload,
if any, follows in lines that start with a tab.

What is counted as one compilation is a `compilation_metrics` record of a frame that has guarded code and at least one
operator in its graph: a graph that was handed to a backend and came back. That is what torch counts in
`torch._dynamo.utils.counters["stats"]["unique_graphs"]`, every recompilation included. Frames that Dynamo skipped, that
held nothing but Python, or whose backend failed are not counted.

Source: torch/_dynamo/utils.py (`CompilationMetrics`) and torch/_logging/_internal.py (`trace_structured`), torch 2.13.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_FILES = "dedicated_log_torch_trace_*.log"
_RECORD = re.compile(r"V\d{4} [\d:.]+ \d+ \S+?:\d+\] (\{.*)")
# "# File: .../autoencoder_kl_flux2.py:221 in _decode, code: ...", above each operator of a printed graph.
_SOURCE = re.compile(r"# File: (.+?):\d+ in ")
# diffusers keeps its VAEs there. The frame itself does not tell: a decorated `decode` is compiled as `wrapper`.
_VAE_SOURCES = "/models/autoencoders/"
_RESUMED = "torch_dynamo_resume_in_"


class TraceError(Exception):
    """A trace does not look as expected."""


@dataclass(frozen=True)
class Compilation:
    """One graph that torch compiled.

    Args:
        function: File, first line and name of the function whose frame was compiled.
        ended: Unix time in seconds.
        vae: Whether the graph came out of a VAE's code.
    """

    function: tuple[str, int, str]
    ended: float
    vae: bool


@dataclass(frozen=True)
class Counts:
    """Compilations of one server.

    Args:
        before: Those that ended before it was ready.
        after: The others; a user waited for each of them.
        transformer_functions: Distinct functions of transformers that were compiled. Modules of one class share theirs.
        vae_functions: The same of VAEs.
    """

    before: int
    after: int
    transformer_functions: int
    vae_functions: int


def count(folder: Path, ready: float) -> Counts:
    """Count what the processes of one server compiled.

    Args:
        folder: What TORCH_TRACE named; empty if nothing was compiled.
        ready: Unix time in seconds at which the server was ready.

    Raises:
        TraceError: A record does not have the fields that are read here.
    """
    compilations = list(compilations_in(folder))
    before = sum(compilation.ended <= ready for compilation in compilations)
    # What follows a graph break is compiled as a function of its own, which nobody wrote.
    functions = {(c.function, c.vae) for c in compilations if not c.function[2].startswith(_RESUMED)}
    return Counts(
        before=before,
        after=len(compilations) - before,
        transformer_functions=sum(not vae and "transformer" in Path(function[0]).name for function, vae in functions),
        vae_functions=sum(vae for _, vae in functions),
    )


def compilations_in(folder: Path) -> Iterator[Compilation]:
    """Read every trace in a folder.

    Raises:
        TraceError: See `count`.
    """
    for file in sorted(folder.glob(_FILES)):
        yield from _compilations(file)


@dataclass
class _Frames:
    """Which frames printed a graph of VAE code; a record of the graph comes before that of its compilation."""

    vae: set[tuple[int, int]] = field(default_factory=set)
    current: tuple[int, int] | None = None


def _compilations(file: Path) -> Iterator[Compilation]:
    frames = _Frames()
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if line.startswith("\t"):
                if frames.current is not None and (source := _SOURCE.search(line)) and _VAE_SOURCES in source[1]:
                    frames.vae.add(frames.current)
                continue
            frames.current = None
            record = _RECORD.match(line)
            if record is None:
                continue
            try:
                compilation = _compilation(json.loads(record[1]), frames)
            except (KeyError, TypeError, ValueError) as error:
                raise TraceError(
                    f"{file.name}, line {number}: expected a record as torch 2.13 writes it, found "
                    f"{line[:120].strip()!r} ({type(error).__name__}: {error})"
                ) from error
            if compilation is not None:
                yield compilation


def _compilation(record: dict[str, Any], frames: _Frames) -> Compilation | None:
    if "dynamo_output_graph" in record:
        frames.current = (record["frame_id"], record["frame_compile_id"])
        return None
    metrics = record.get("compilation_metrics")
    if metrics is None or not metrics["has_guarded_code"] or not metrics["graph_op_count"]:
        return None
    return Compilation(
        function=(metrics["co_filename"], metrics["co_firstlineno"], metrics["co_name"]),
        ended=metrics["end_time_us"] / 1e6,
        vae=(record["frame_id"], record["frame_compile_id"]) in frames.vae,
    )
