"""What is happening, while it happens."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

if TYPE_CHECKING:
    from typing_extensions import Self

# Where nothing can be overwritten (a CI log), one line each so many seconds at most.
_PLAIN_INTERVAL_S = 15.0
_PLAIN_MESSAGE_WIDTH = 120


class Activity:
    """A line that is overwritten on a terminal, and a line now and then elsewhere; as a context manager.

    Args:
        console: Where to show it.
        title: What the line is about.
    """

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._bar = Progress(
            SpinnerColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(title, total=None)
        self._started = self._shown = time.monotonic()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, message: str) -> None:
        """Show what happens now, beside the time it has taken so far."""
        self._bar.update(self._task, description=f"{self._title}: {message}")
        if self._console.is_terminal:
            return
        now = time.monotonic()
        if now - self._shown >= _PLAIN_INTERVAL_S:
            self._shown = now
            self._console.print(Text(f"  {now - self._started:4.0f} s  {message[:_PLAIN_MESSAGE_WIDTH]}"))
