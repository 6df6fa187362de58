"""What compiled callables of one kind share: whether they are eager for good, and who is told when they become so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a latch was closed.

    Args:
        error_type: Type of the exception.
        reason: First line of its text.
        error: What the compiled callable raised; None if it failed on another rank.
        rank: The rank that it failed on; None if it failed here.
        elsewhere: Whether it was another latch's callable that failed, for a reason that holds for this one too.
    """

    error_type: str
    reason: str
    error: Exception | None = None
    rank: int | None = None
    elsewhere: bool = False


class Latch:
    """Open until a call fails for the compiler's fault, then closed for good.

    Blocks of one class share one: what the compiler cannot do for the first it cannot do for the others, and trying
    costs seconds each.

    Attributes:
        name: What it stands for, `component region`.
        closed: Whether everything that shares it runs eagerly.
        failure: What closed it; None as long as it is open.
        graphs: Graphs compiled in calls of what shares it.

    Args:
        name: See above.
        on_close: Told once, why.
        passes_through: Errors that are no failure of a call (an aborted request, a client error): raised as they are,
            and nothing is tried again. KeyboardInterrupt and other BaseExceptions always are.
    """

    def __init__(
        self,
        name: str,
        on_close: Callable[[Failure], None],
        *,
        passes_through: tuple[type[BaseException], ...] = (),
    ) -> None:
        self.name = name
        self.closed = False
        self.failure: Failure | None = None
        self.graphs = 0
        self.passes_through = passes_through
        self._on_close = on_close
        self._lock = threading.Lock()

    def close(self, error: Exception) -> None:
        """Close it after a failure here."""
        raised = compiler_error(error)
        self._close(Failure(error_type=type(raised).__name__, reason=first_line(raised), error=error))

    def close_for(self, rank: int, error_type: str, reason: str) -> None:
        """Close it after a failure on another rank."""
        self._close(Failure(error_type=error_type, reason=reason, rank=rank))

    def close_with(self, failure: Failure) -> None:
        """Close it for what failed under another latch."""
        self._close(replace(failure, elsewhere=True))

    def _close(self, failure: Failure) -> None:
        with self._lock:
            first = not self.closed
            if first:
                self.failure, self.closed = failure, True
        if first:
            self._on_close(failure)


def without_frames(error: Exception) -> Exception:
    """Drop the tracebacks of an error and of what caused it: their frames hold the tensors of the failed call."""
    for link in list(chain(error)):
        link.__traceback__ = None
    return error


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what caused it; Dynamo wraps what a backend raised."""
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def first_line(error: BaseException) -> str:
    """First line of an error's text, for one line in a log."""
    return next(iter(str(error).strip().splitlines()), "no message")


def compiler_error(error: Exception) -> Exception:
    """Return what a backend raised, where Dynamo has wrapped it."""
    inner = getattr(error, "inner_exception", None)
    return inner if isinstance(inner, Exception) else error
