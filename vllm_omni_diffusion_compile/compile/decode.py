"""VAE decode that is compiled where that is faster: a graph for each declared shape, one for all others, or none."""

from __future__ import annotations

import functools
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch

from vllm_omni_diffusion_compile.compile.fallback import empty_cache, itself

Way = Literal["compiled", "eager"]

# Of each, in turns; the median counts. A decode takes a tenth of a second; where it takes seconds, once has to do.
_TIMES = 3
_LONGEST_S = 3.0
# Compiled has to be this much faster to be worth a wait at the next start, and what may go wrong with it.
_GAIN = 1.02


class Compiled(Protocol):
    """A compiled callable with eager fallback, as `FallbackCallable` is."""

    @property
    def latched(self) -> bool:
        """Whether every call runs eagerly now."""

    @property
    def graphs(self) -> int:
        """Graphs compiled in its calls."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Decode."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Eager and compiled decode of one shape, side by side.

    Args:
        shape: Of the latents: `bfloat16[1, 16, 128, 128]`.
        eager_s: Median seconds; infinite where it ran out of memory, beside the result of the call that is measured.
        compiled_s: The same.
        way: Which is kept.
        static: Whether the compiled one is a graph of this shape alone.
    """

    shape: str
    eager_s: float
    compiled_s: float
    way: Way
    static: bool


@dataclass
class _Class:
    """The calls of one shape.

    Attributes:
        compiled: What is compiled for them; None if nothing is.
        static: Whether that is for this shape alone.
        way: What runs.
        measured: What was measured, if anything was.
        tiled: Whether eager decode ran out of memory, and is tiled.
    """

    compiled: Compiled | None
    static: bool
    way: Way
    measured: Measured | None = None
    tiled: bool = False


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How a decode decides; what is left out keeps what a compiled decode does by itself.

    Args:
        measure: Time both ways on the shapes that are warmed up and keep the faster; else what is compiled is used.
        static: Makes a compiled decode for a shape of its own; None if shapes are not declared.
        declared: Whether the call at hand is of a declared shape.
        ready: Whether the server is ready: from then on nothing new is compiled on purpose.
        told: Told what was measured.
        tiled: Told when eager decode ran out of memory and is tiled from now on.
    """

    measure: bool = True
    static: Callable[[], Compiled | None] | None = None
    declared: Callable[[], bool] = lambda: False
    ready: Callable[[], bool] = lambda: False
    told: Callable[[Measured], None] = lambda _: None
    tiled: Callable[[str], None] = lambda _: None


@dataclass
class ChosenDecode:
    """Decodes each shape the way that was found to be faster.

    Args:
        eager: The component's own decode.
        shared: Compiled for any shape; None if shapes are declared: then the undeclared ones stay eager, so that nobody
            waits for the compiler.
        rules: See `Rules`.
        component: The VAE, for tiling.
    """

    eager: Callable[..., Any]
    shared: Compiled | None
    rules: Rules
    component: Any = None
    _classes: dict[str, _Class] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        functools.update_wrapper(self, self.eager)

    @property
    def latched(self) -> bool:
        """Whether nothing that was compiled is used any more."""
        compiled = self._compiled()
        return bool(compiled) and all(one.latched for one in compiled)

    @property
    def graphs(self) -> int:
        """Graphs compiled in calls of this."""
        return sum(one.graphs for one in self._compiled())

    @property
    def measured(self) -> list[Measured]:
        """What was measured so far."""
        return [found.measured for found in self._classes.values() if found.measured is not None]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Decode."""
        shape = _shape(args, kwargs)
        found = self._classes.get(shape) or self._class(shape)
        if found.tiled:
            return self._tiled(args, kwargs)
        if found.compiled is None or found.way == "eager":
            return self._or_tiled(self.eager, found, shape, args, kwargs)
        graphs = found.compiled.graphs
        result = self._or_tiled(found.compiled, found, shape, args, kwargs)
        due = self.rules.measure and found.measured is None and not self.rules.ready()
        # A graph of one shape is what it will be once it is compiled; one that all share may still become dynamic.
        compiled_now = found.compiled.graphs > graphs
        if due and found.compiled.graphs and (found.static or not compiled_now) and not found.compiled.latched:
            self._measure(found, shape, args, kwargs)
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is the eager callable, as with `FallbackCallable`."""
        return itself, (self.eager,)

    def agree(self, of_all_ranks: Iterable[Iterable[Measured]]) -> None:
        """Decide as all ranks do that decode the same shapes: by the sum of what they measured.

        Args:
            of_all_ranks: What each rank measured, this one among them.
        """
        seconds: dict[str, list[tuple[float, float]]] = {}
        for measured in of_all_ranks:
            for one in measured:
                seconds.setdefault(one.shape, []).append((one.eager_s, one.compiled_s))
        for found in self._classes.values():
            if found.measured is not None:
                eager_s, compiled_s = map(sum, zip(*seconds[found.measured.shape], strict=True))
                found.way = _faster(eager_s, compiled_s)
                found.measured = replace(found.measured, eager_s=eager_s, compiled_s=compiled_s, way=found.way)
        self._settle_shared()

    def _compiled(self) -> list[Compiled]:
        own = [found.compiled for found in self._classes.values() if found.static and found.compiled is not None]
        return own + ([self.shared] if self.shared is not None else [])

    def _class(self, shape: str) -> _Class:
        """Decide how a shape that was not met before is decoded."""
        with self._lock:
            if shape in self._classes:
                return self._classes[shape]
            static = self.rules.static
            if static is not None and not self.rules.ready():
                if not self.rules.declared():  # the release's own dummy run
                    return _Class(compiled=None, static=False, way="eager")
                compiled = static()
                found = _Class(compiled=compiled, static=True, way="compiled" if compiled else "eager")
            else:
                found = _Class(compiled=self.shared, static=False, way=self._shared_way())
            self._classes[shape] = found
            return found

    def _shared_way(self) -> Way:
        """What was found of the graph that all shapes share holds for a shape that was not measured."""
        if self.shared is None:
            return "eager"
        shared = [one for one in self.measured if not one.static]
        if not shared:
            return "compiled"
        return _faster(sum(one.eager_s for one in shared), sum(one.compiled_s for one in shared))

    def _settle_shared(self) -> None:
        for found in self._classes.values():
            if not found.static and found.measured is None:
                found.way = self._shared_way()

    def _measure(self, found: _Class, shape: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        assert found.compiled is not None
        eager: list[float] = []
        compiled: list[float] = []
        began = time.monotonic()
        while len(eager) < _TIMES and (not eager or time.monotonic() - began < _LONGEST_S):
            compiled.append(_seconds(found.compiled, args, kwargs))
            eager.append(_seconds(self.eager, args, kwargs))
        eager_s, compiled_s = statistics.median(eager), statistics.median(compiled)
        found.way = _faster(eager_s, compiled_s)
        found.measured = Measured(
            shape=shape, eager_s=eager_s, compiled_s=compiled_s, way=found.way, static=found.static
        )  # fmt: skip
        self._settle_shared()
        self.rules.told(found.measured)

    def _or_tiled(
        self, decode: Callable[..., Any], found: _Class, shape: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Decode, and where that runs out of memory, once more in tiles, as from then on."""
        try:
            return decode(*args, **kwargs)
        except torch.OutOfMemoryError:
            if not callable(getattr(self.component, "enable_tiling", None)) or _tiles(self.component):
                raise
        # Outside of the except block, so that nothing keeps the tensors of the failed call alive.
        empty_cache()
        result = self._tiled(args, kwargs)
        found.tiled = True
        self._classes.setdefault(shape, found)
        self.rules.tiled(shape)
        return result

    def _tiled(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with self._lock:
            before = _tiles(self.component)
            self.component.enable_tiling()
            try:
                return self.eager(*args, **kwargs)
            finally:
                if not before:
                    self.component.use_tiling = False


def _faster(eager_s: float, compiled_s: float) -> Way:
    return "compiled" if eager_s >= compiled_s * _GAIN else "eager"


def _tiles(component: Any) -> bool:
    return bool(getattr(component, "use_tiling", False))


def _shape(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Name the latents of a call, by which calls are told apart."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return "no tensor"


def _seconds(decode: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
    """Time a decode; infinite if there is not the memory for another one."""
    _synchronize()
    start = time.perf_counter()
    try:
        decode(*args, **kwargs)
        _synchronize()
    except torch.OutOfMemoryError:
        pass
    else:
        return time.perf_counter() - start
    empty_cache()
    return float("inf")


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
