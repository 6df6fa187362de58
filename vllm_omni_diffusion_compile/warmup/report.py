"""What is warm and what is not, as one document: written when the server is ready, and added to while it serves."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from vllm_omni_diffusion_compile.warmup.declared import Outcome

VERSION = 1
# Where a server shows its report.
ROUTE = "/v1/diffusion_compile/report"
# Different undeclared shapes that are kept; a server that meets more of them is not served by declaring each.
MOST_UNDECLARED = 100
# A file that changes with every request would cost more than it tells.
WRITE_EVERY_S = 5.0


def document(
    outcomes: Sequence[Outcome],
    *,
    budget_s: float | None,
    spent_s: float,
    about: Mapping[str, Any],
    eager: Iterable[str] = (),
) -> dict[str, Any]:
    """Return the report on a start.

    Args:
        outcomes: One for each declared shape.
        budget_s: As it was set.
        spent_s: Seconds that warming up took.
        about: What was started: release, model, settings.
        eager: What could not be compiled and runs eagerly: component, region and error.
    """
    return {
        "version": VERSION,
        **about,
        "written_at": time.time(),
        "budget_s": budget_s,
        "spent_s": spent_s,
        "shapes": [outcome.as_dict() for outcome in outcomes],
        "eager": list(eager),
        "undeclared": [],
    }


def write(path: Path, report: Mapping[str, Any]) -> None:
    """Write a report so that a reader finds the old one or the new one, readable by its owner alone.

    Raises:
        OSError: It could not be written; what was there before is unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Made with mode 0600, beside its final place, so that the rename stays on one file system.
    handle, unfinished = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(report, file, indent=1, default=str)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        Path(unfinished).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(unfinished).unlink()
        raise


class Report:
    """A report that grows by the undeclared shapes that users ask for. Safe to use from several threads.

    Args:
        content: What it says so far.
        path: Where it is written; None keeps it in memory.
        failed: Told of the first time that it could not be written.
        every_s: It is written no more often than that.
    """

    def __init__(
        self,
        content: dict[str, Any],
        path: Path | None = None,
        failed: Callable[[OSError], None] = lambda _: None,
        every_s: float = WRITE_EVERY_S,
    ) -> None:
        self._content = content
        self._path = path
        self._failed: Callable[[OSError], None] | None = failed
        self._every_s = every_s
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._written: float | None = None

    @property
    def content(self) -> dict[str, Any]:
        """A copy of what it says now."""
        with self._lock:
            return copy.deepcopy(self._content)

    def write(self) -> None:
        """Write it now; a failure is told once, and costs nothing but the file."""
        with self._lock:
            self._timer = None
            if self._path is None:
                return
            self._content["written_at"] = time.time()
            self._written = time.monotonic()
            try:
                write(self._path, self._content)
            except OSError as error:
                if self._failed is not None:
                    self._failed(error)
                self._failed = None

    def add(self, met: Iterable[Mapping[str, Any]]) -> None:
        """Remember what users' requests waited for.

        Args:
            met: `request` (the shape), `component`, `region`, `seconds` and `at` of each compilation.
        """
        with self._lock:
            changed = [_remember(self._content, event) for event in met if event.get("request") is not None]
            if not any(changed) or self._path is None or self._timer is not None:
                return
            since = self._every_s if self._written is None else time.monotonic() - self._written
            self._timer = threading.Timer(max(0.0, self._every_s - since), self.write)
            self._timer.daemon = True
            self._timer.start()


def _remember(report: dict[str, Any], event: Mapping[str, Any]) -> bool:
    """Add one compilation to the undeclared shapes; returns whether anything changed."""
    known: list[dict[str, Any]] = report["undeclared"]
    entry = next((item for item in known if item["shape"] == event["request"]), None)
    if entry is None:
        if len(known) >= MOST_UNDECLARED:
            report["undeclared_left_out"] = report.get("undeclared_left_out", 0) + 1
            return True
        entry = {
            "shape": dict(event["request"]),
            "compile_events": 0,
            "compile_s": 0.0,
            "regions": [],
            "first_at": event["at"],
        }
        known.append(entry)
    entry["compile_events"] += 1
    entry["compile_s"] += event["seconds"]
    entry["last_at"] = event["at"]
    where = f"{event['component']} {event['region']}"
    if where not in entry["regions"]:
        entry["regions"].append(where)
    return True


HEADINGS = ("Shape", "State", "Cold, s", "Warm, s", "Compiling, s", "Events", "Peak, MB", "Why")


def rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the cells of the table of a report, under `HEADINGS`."""
    return [
        (
            shape["name"],
            shape["state"],
            _number((shape["cold"] or {}).get("total_s"), 2),
            _number((shape["warm"] or {}).get("total_s"), 2),
            _number(shape["compile_s"], 1),
            _number(shape["compile_events"], 0),
            _number(shape["peak_memory_mb"], 0),
            shape["reason"],
        )
        for shape in report["shapes"]
    ]


def as_text(report: Mapping[str, Any]) -> str:
    """Return the table of a report as lines of plain text, for a log."""
    table = [HEADINGS, *rows(report)]
    widths = [max(len(row[column]) for row in table) for column in range(len(HEADINGS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
    return "\n".join(line.rstrip() for line in [*lines, eager_line(report)] if line)


def eager_line(report: Mapping[str, Any]) -> str:
    """Return what a reader has to know beside the table, whose shapes are warm without it too; empty if nothing."""
    eager = report.get("eager")
    return f"Could not be compiled, and runs eagerly: {', '.join(eager)}." if eager else ""


def as_yaml(shape: Mapping[str, Any]) -> str:
    """Return a shape as one line of YAML, to paste under `shapes:`."""
    plain = json.loads(json.dumps(shape, default=str))
    return "- " + yaml.safe_dump(plain, default_flow_style=True, sort_keys=False, width=float("inf")).rstrip()


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
