"""Which arm does what, while it does, and how far the run is."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Column

if TYPE_CHECKING:
    from typing_extensions import Self

# Where nothing can be overwritten (a CI log), a line of the same arm each so many seconds at most.
_PLAIN_INTERVAL_S = 30.0
_WIDTH = 100


class Progress:
    """A bar on a terminal, and a line now and then elsewhere; on standard error, as a context manager.

    Args:
        requests: How many there will be in all.
    """

    def __init__(self, requests: int) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bars = Bars(
            TextColumn("{task.fields[who]} {task.fields[seconds]:.0f} s", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bars.add_task("", total=requests, who="", seconds=0.0)
        self._who = ""
        self._since = self._shown = self._began = time.monotonic()

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bars.stop()

    def show(self, who: str, message: str) -> None:
        """Show what an arm does, and the seconds since it began."""
        now = time.monotonic()
        changed = who != self._who
        if changed:
            self._who, self._since = who, now
        self._bars.update(self._task, description=message, who=who, seconds=now - self._since)
        if not self._console.is_terminal and (changed or now - self._shown >= _PLAIN_INTERVAL_S):
            self._shown = now
            sys.stderr.write(f"{now - self._began:5.0f} s  {who}: {message[:_WIDTH]}\n")

    def advance(self) -> None:
        """Count a request."""
        self._bars.advance(self._task)
