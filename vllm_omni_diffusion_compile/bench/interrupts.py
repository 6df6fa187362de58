"""SIGINT, SIGTERM and SIGHUP as one exception, which cannot hit where a process would be left behind."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """The program was told to stop.

    Args:
        number: The signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class _State:
    deferred = 0
    pending: int | None = None


@contextmanager
def raised() -> Iterator[None]:
    """Raise `Interrupted` on each of the signals within the block.

    Even where a shell had SIGINT ignored, as it does for what runs in the background; SIGHUP stays ignored, which is
    what `nohup` is for.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may say what a signal does
        return
    nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    before = {
        number: signal.signal(number, _handle) for number in _SIGNALS if not (nohup and number == signal.SIGHUP)
    }  # fmt: skip
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def deferred() -> Iterator[None]:
    """Hold `Interrupted` back until the block has ended."""
    _State.deferred += 1
    try:
        yield
    finally:
        _State.deferred -= 1
        if not _State.deferred and _State.pending is not None:
            number, _State.pending = _State.pending, None
            raise Interrupted(number)


def _handle(number: int, _: FrameType | None) -> None:
    if _State.deferred:
        _State.pending = number
    else:
        raise Interrupted(number)
