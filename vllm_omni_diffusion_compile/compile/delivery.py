"""The way of events from the process that compiles to the one that counts: sent more than once, taken once."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypedDict

from vllm_omni_diffusion_compile.compile.events import CompileEvent, EventLog

# How many results an event is sent with. The result of an aborted request is dropped on its way, and a request that
# waited for the compiler is the likeliest one to be aborted.
_RESULTS = 8


class Parcel(TypedDict):
    """Consecutive events of one process, as plain data: it can be pickled, and packed with msgpack.

    Attributes:
        pid: Process that they happened in.
        first: Number of the first of them, counted from the start of that process's log.
        events: `CompileEvent.as_dict` of each.
    """

    pid: int
    first: int
    events: list[dict[str, Any]]


class Cursor:
    """Reads a log from where it read last."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._at = 0

    def new(self) -> list[CompileEvent]:
        """Return the events that were not returned before."""
        events, self._at = self._log.since(self._at)
        return events


class Outgoing:
    """What the process that compiles still has to send, result by result.

    Args:
        log: Its events.
        results: How many results each event goes with.
    """

    def __init__(self, log: EventLog, results: int = _RESULTS) -> None:
        self._log = log
        # Lengths of the log at the latest results: what came after the oldest of them is still on its way.
        self._lengths: deque[int] = deque([0], maxlen=results)

    def with_result(self) -> Parcel | None:
        """Return what has to go with a result that is about to be sent; None, in a microsecond, for most."""
        first = self._lengths[0]
        events, length = self._log.since(first)
        self._lengths.append(length)
        return _parcel(first, events) if events else None

    def everything(self) -> Parcel:
        """Return the whole log, for a way on which nothing gets lost: results then carry only what comes later."""
        events, length = self._log.since()
        self._lengths.clear()
        self._lengths.append(length)
        return _parcel(0, events)


class Incoming:
    """What has arrived in a process and waits to be counted. Safe to use from several threads."""

    def __init__(self) -> None:
        self._next: dict[int, int] = {}
        self._waiting: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def take(self, parcel: Parcel, keep: Callable[[CompileEvent], bool] = lambda _: True) -> list[CompileEvent]:
        """Take in a parcel.

        Args:
            parcel: Some of its events, or all of them, may have arrived before.
            keep: Which of the new ones are to be counted.

        Returns:
            The new events that wait now.
        """
        with self._lock:
            known = self._next.get(parcel["pid"], 0)
            new = parcel["events"][max(0, known - parcel["first"]) :]
            self._next[parcel["pid"]] = max(known, parcel["first"] + len(parcel["events"]))
            kept = [event for event in map(CompileEvent.from_dict, new) if keep(event)]
            self._waiting += [event.as_dict() for event in kept]
            return kept

    @property
    def waiting(self) -> bool:
        """Whether `drain` would return anything."""
        return bool(self._waiting)

    def drain(self) -> list[dict[str, Any]]:
        """Return what waits, each event once."""
        with self._lock:
            events, self._waiting = self._waiting, []
            return events


def _parcel(first: int, events: Iterable[CompileEvent]) -> Parcel:
    return {"pid": os.getpid(), "first": first, "events": [event.as_dict() for event in events]}
