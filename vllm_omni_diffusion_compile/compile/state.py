"""The Python state that a call may change, so that the call can be repeated from where it started."""

from __future__ import annotations

from typing import Any

import torch

# Bookkeeping of nn.Module itself; no decode changes it.
_MODULE_INTERNALS = frozenset(vars(torch.nn.Module()))

_NESTED = frozenset({list, dict})

Snapshot = list[tuple[Any, Any]]


class CallState:
    """Lists, dicts and attributes that a callable may change: those of its owner and those among its arguments.

    Video VAEs (Wan, Qwen-Image) keep a `feat_cache` list and an index into it, on the module or handed from call to
    call. A call that dies half-way leaves both half written, and a second attempt would continue there. Containers are
    copied and put back in place, so whoever shares them sees the old content; tensors are kept by reference, not
    copied.

    Args:
        function: The callable; its owner is `function.__self__`, if any.
    """

    def __init__(self, function: Any) -> None:
        owner = getattr(function, "__self__", None)
        self._attributes: dict[str, Any] | None = getattr(owner, "__dict__", None)
        self._containers: tuple[str, ...] = ()
        self._empty: tuple[str, ...] = ()
        self._seen = -1
        self._stateful = True

    def capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Snapshot:
        """Copy what the call may change; microseconds, for it runs before every compiled call."""
        snapshot: Snapshot = []
        attributes = self._attributes
        if attributes is not None and (self._stateful or len(attributes) != self._seen):
            self._capture_attributes(attributes, snapshot)
        _add_arguments(snapshot, args, kwargs)
        return snapshot

    def _capture_attributes(self, attributes: dict[str, Any], snapshot: Snapshot) -> None:
        if len(attributes) != self._seen or any(attributes.get(name) is not None for name in self._empty):
            # Look again: caches tend to appear at the first call, or to take the place of a None.
            own = {name: value for name, value in attributes.items() if name not in _MODULE_INTERNALS}
            self._containers = tuple(name for name, value in own.items() if type(value) in _NESTED)
            self._empty = tuple(name for name, value in own.items() if value is None)
            self._seen = len(attributes)
            # A component without any is copied this once, for its first call may be the one that makes a cache.
            self._stateful = bool(self._containers or self._empty)
        snapshot.append((attributes, attributes.copy()))
        for name in self._containers:
            if type(value := attributes.get(name)) in _NESTED:
                _add(snapshot, value)


class ArgumentState:
    """Lists and dicts among the arguments of a callable whose owner keeps no state, as blocks of a transformer do."""

    def capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Snapshot:
        """Copy what the call may change."""
        snapshot: Snapshot = []
        _add_arguments(snapshot, args, kwargs)
        return snapshot


def restore(snapshot: Snapshot) -> None:
    """Put back what `CallState.capture` copied."""
    for container, before in snapshot:
        if isinstance(container, list):
            container[:] = before
            continue
        for name in set(container) - set(before):
            del container[name]
        for name, value in before.items():
            if container.get(name) is not value:
                container[name] = value


def _add_arguments(snapshot: Snapshot, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for value in args:
        if type(value) is list or type(value) is dict:
            _add(snapshot, value)
    for value in kwargs.values():
        if type(value) is list or type(value) is dict:
            _add(snapshot, value)


def _add(snapshot: Snapshot, container: Any) -> None:
    snapshot.append((container, container.copy()))
    values = container.values() if type(container) is dict else container
    # A cache holds tensors in most cases: asking for the types first is five times as fast as looking at each value.
    if _NESTED.isdisjoint(map(type, values)):
        return
    for value in values:
        if type(value) in _NESTED:
            _add(snapshot, value)
