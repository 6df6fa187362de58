"""The Python state that a call may change, so that the call can be repeated from where it started."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch

# Bookkeeping of nn.Module itself; no decode changes it.
_MODULE_INTERNALS = frozenset(vars(torch.nn.Module()))

_NESTED = frozenset({list, dict})

# Where vLLM-Omni's hooks (offload, caches) keep themselves on a module, and Cache-DiT what it knows of a transformer.
HOOKS = "_hook_registry"
_CACHE_DIT = "_context_manager"
_HOST = "vllm_omni"

Snapshot = list[tuple[Any, Any]]


class State(Protocol):
    """What a call may change."""

    def capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Snapshot:
        """Copy it, before a call with these arguments."""


class CallState:
    """Lists, dicts and attributes that a callable may change: those of its owner and those among its arguments.

    Video VAEs (Wan, Qwen-Image) keep a `feat_cache` list and an index into it, on the module or handed from call to
    call. A call that dies half-way leaves both half written, and a second attempt would continue there. Containers are
    copied and put back in place, so whoever shares them sees the old content; tensors are kept by reference, not
    copied.

    Args:
        function: The callable; its owner is `function.__self__`, if any.
    """

    # Whether numbers among the attributes may be all that changes.
    _counts = False

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
            self._stateful = self._counts or bool(self._containers or self._empty)
        snapshot.append((attributes, attributes.copy()))
        for name in self._containers:
            if type(value := attributes.get(name)) in _NESTED:
                _add(snapshot, value)


class ComponentState(CallState):
    """What `CallState` has, of a component that is compiled as a whole, and what its caches know of earlier steps.

    TeaCache, MagCache and SeaCache are hooks on the component or its blocks; Cache-DiT replaces its forward. They count
    steps and decide by the step before what to compute. They run in the middle of the call, between two graphs.

    Args:
        component: The component; its hooks may come later.
    """

    _counts = True

    def __init__(self, component: torch.nn.Module) -> None:
        super().__init__(component.__call__)
        self._component = vars(component)
        lists = (module for module in component.modules() if isinstance(module, torch.nn.ModuleList))
        self._hooked = [self._component, *(vars(block) for blocks in lists for block in blocks)]

    def capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Snapshot:
        """Copy what the call may change; where there are no caches, a look at each block is all it costs."""
        snapshot = super().capture(args, kwargs)
        seen: set[int] = set()
        for registry in [attributes[HOOKS] for attributes in self._hooked if HOOKS in attributes]:
            for hook in registry._hooks.values():  # noqa: SLF001 - as everywhere: the host has no public name for it
                _add_objects(snapshot, hook, {_HOST, _package(hook)}, seen)
        if (cache := self._component.get(_CACHE_DIT)) is not None:
            _add_objects(snapshot, cache, {_package(cache)}, seen)
        return snapshot


class ArgumentState:
    """Lists and dicts among the arguments of a callable whose owner keeps no state, as blocks of a transformer do."""

    def capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Snapshot:
        """Copy what the call may change."""
        snapshot: Snapshot = []
        _add_arguments(snapshot, args, kwargs)
        return snapshot


def restore(snapshot: Snapshot) -> None:
    """Put back what `capture` copied."""
    for container, before in snapshot:
        if isinstance(container, list):
            container[:] = before
            continue
        if not isinstance(container, dict):
            for name, value in before.items():
                if getattr(container, name, None) is not value:
                    setattr(container, name, value)
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


def _add_objects(snapshot: Snapshot, value: Any, packages: set[str], seen: set[int]) -> None:
    """Add lists, dicts and the objects of some packages, with what those hold; neither modules nor tensors."""
    if id(value) in seen or isinstance(value, (torch.nn.Module, torch.Tensor)):
        return
    seen.add(id(value))
    if isinstance(value, list):
        snapshot.append((value, value.copy()))
        parts = value
    elif isinstance(value, dict):
        snapshot.append((value, value.copy()))
        parts = list(value.values())
    elif _package(value) in packages:
        attributes = getattr(value, "__dict__", {})
        slots = dict(_slots(value))
        snapshot += [(attributes, attributes.copy()), (value, slots)]
        parts = [*attributes.values(), *slots.values()]
    else:
        return
    for part in parts:
        _add_objects(snapshot, part, packages, seen)


def _package(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def _slots(value: Any) -> Iterator[tuple[str, Any]]:
    for cls in type(value).__mro__:
        for name in vars(cls).get("__slots__", ()):
            if hasattr(value, name):
                yield name, getattr(value, name)
