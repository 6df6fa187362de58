"""What the compiler did in this process, as facts: from torch's own records, not from the text of a log."""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

from vllm_omni_diffusion_compile.compile.numbers import NUMBERS

Kind = Literal["compilation", "recompilation", "recompile limit", "fallback", "set-up failed"]

# Records that torch is to keep, one a frame, until a call has ended: 64 are its default, and in full scope each graph
# break of the component makes a frame.
_MOST_FRAMES = 1024
# Tensors named in an event; a call with more has its shape in the first of them.
_MOST_SHAPES = 8


@dataclass(frozen=True, kw_only=True)
class CompileEvent:
    """One thing that the compiler did, or failed to do.

    Args:
        kind: `compilation` (the first graph for a piece of code), `recompilation` (a guard failed), `recompile limit`
            (torch compiles this code no further: calls that no graph fits run eagerly), `fallback` (a call failed
            compiled and succeeded eagerly: the region is eager for good), `set-up failed` (torch.compile itself
            raised).
        component: Path of the component in its pipeline: `transformer`, `vae`.
        region: Class of the block, of the component in full scope, or `decode`.
        shapes: Tensors of the call, `name: dtype[sizes]`.
        reason: The guard that failed; for a failure the first line of the error.
        error: Type of the exception, for a failure.
        seconds: What torch spent on compiling, in seconds.
        after_ready: Whether a user's request waited for it.
        at: When it was recorded, in seconds since the epoch.
        rank: Rank of the process among those of its stage.
        request: After ready, the request that waited, as the shape to declare; None if it is not known.
    """

    kind: Kind
    component: str
    region: str
    shapes: tuple[str, ...] = ()
    reason: str = ""
    error: str = ""
    seconds: float = 0.0
    after_ready: bool = False
    at: float = 0.0
    rank: int = 0
    request: Mapping[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON and for the way between processes."""
        return asdict(self) | {"shapes": list(self.shapes)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CompileEvent:
        """Undo `as_dict`."""
        return cls(**{**data, "shapes": tuple(data["shapes"])})


@dataclass
class EventLog:
    """The events of one process, in order. Safe to use from several threads.

    Attributes:
        ready: Whether the server has said that it is ready.
        rank: Rank that new events carry.
        listeners: Told each event after it was recorded, in the thread that recorded it.
        ready_listeners: Called when the server has become ready.
        declared: Whether the request that is being executed is of a declared shape, before ready.
        describe: Says which request is being executed, as the shape to declare; None before the first.
    """

    ready: bool = False
    rank: int = 0
    listeners: list[Callable[[CompileEvent], None]] = field(default_factory=list)
    ready_listeners: list[Callable[[], None]] = field(default_factory=list)
    describe: Callable[[], Mapping[str, Any] | None] | None = None
    declared: bool = False
    _events: list[CompileEvent] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def record(self, kind: Kind, component: str, region: str, **details: Any) -> CompileEvent:
        """Add an event, stamped with time, rank and whether the server was ready."""
        request = self.describe() if self.ready and self.describe is not None else None
        event = CompileEvent(
            kind=kind, component=component, region=region, request=request,
            after_ready=self.ready, rank=self.rank, at=time.time(), **details,
        )  # fmt: skip
        with self._lock:
            self._events.append(event)
        for listener in self.listeners:
            listener(event)
        return event

    def become_ready(self) -> None:
        """Note that the server is ready: what is compiled from now on, a user's request waits for."""
        self.ready = True
        for listener in self.ready_listeners:
            listener()

    def since(self, cursor: int = 0) -> tuple[list[CompileEvent], int]:
        """Return the events after a cursor, and the cursor to ask with next time."""
        with self._lock:
            return self._events[cursor:], len(self._events)

    def clear(self) -> None:
        """Forget everything; for tests."""
        with self._lock:
            self._events.clear()
        self.ready = False
        self.describe = None
        self.declared = False


LOG = EventLog()


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Events summed up.

    Args:
        compilations: Compilations and recompilations, by component and region.
        seconds: Seconds spent on them.
        fallbacks: Regions that became eager, by component and region.
        limits: Regions that reached the recompile limit, by component and region.
    """

    compilations: Mapping[tuple[str, str], int]
    seconds: float
    fallbacks: Mapping[tuple[str, str], int]
    limits: Mapping[tuple[str, str], int]

    def __str__(self) -> str:
        compiled = ", ".join(f"{component} {region} {n}" for (component, region), n in self.compilations.items())
        parts = [
            f"{sum(self.compilations.values())} compilation(s) in {self.seconds:.1f} s"
            + f" ({compiled})" * bool(compiled)
        ]
        parts += [f"{component} {region} is eager after a failure" for component, region in self.fallbacks]
        parts += [f"{component} {region} reached its recompile limit" for component, region in self.limits]
        return "; ".join(parts)


def summarize(events: Iterable[CompileEvent]) -> Summary:
    """Sum events up by component and region."""
    compilations: Counter[tuple[str, str]] = Counter()
    fallbacks: Counter[tuple[str, str]] = Counter()
    limits: Counter[tuple[str, str]] = Counter()
    seconds = 0.0
    for event in events:
        key = (event.component, event.region)
        seconds += event.seconds
        if event.kind in ("compilation", "recompilation"):
            compilations[key] += 1
        elif event.kind == "recompile limit":
            limits[key] += 1
        else:
            fallbacks[key] += 1
    return Summary(compilations=compilations, seconds=seconds, fallbacks=fallbacks, limits=limits)


def compiled_graphs() -> int:
    """Number of graphs that TorchDynamo has compiled in this process; each recompilation adds at least one.

    Source: `torch._dynamo.utils.counters["stats"]["unique_graphs"]`, which torch counts up for every graph it hands to
    a backend. Nothing was compiled in a process that has not imported `torch._dynamo`.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0


class CompilationRecords:
    """Torch's records of the frames it compiled, each read once.

    Some are not of frames: the first run of a Triton kernel that is tuned then leaves one that names no function and no
    failure.

    Source: `torch._dynamo.utils.get_compilation_metrics`.
    """

    def __init__(self) -> None:
        self._last: Any = None
        self._lock = threading.Lock()

    def new(self) -> list[Any]:
        """Return the records that were not returned before, oldest first."""
        from torch._dynamo.utils import get_compilation_metrics

        with self._lock:
            fresh = list(
                itertools.takewhile(lambda record: record is not self._last, reversed(get_compilation_metrics()))
            )
            if fresh:
                self._last = fresh[0]
            return [record for record in fresh[::-1] if record.co_name is not None or record.fail_type is not None]


_RECORDS = CompilationRecords()


def recorder(component: str, region: str) -> Callable[[int, tuple[Any, ...], Mapping[str, Any]], int]:
    """Return `record_compilations` for a region, and have torch keep the records of as many frames as a call has."""
    from torch._dynamo.utils import set_compilation_metrics_limit

    set_compilation_metrics_limit(_MOST_FRAMES)
    return functools.partial(record_compilations, component, region)


def record_compilations(
    component: str, region: str, frames: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> int:
    """Turn what torch compiled in a call that has just ended into events of a region.

    Args:
        component: See `CompileEvent`.
        region: See `CompileEvent`.
        frames: Frames that torch looked at during the call, by its counter; it keeps a record of each.
        args: Of the call that compiled; their shapes are recorded.
        kwargs: The same.

    Returns:
        How many graphs were compiled.
    """
    NUMBERS.look_at_arguments(args, kwargs)
    graphs = 0
    shapes: tuple[str, ...] | None = None
    # What is older was compiled elsewhere, outside of the regions.
    for record in _RECORDS.new()[-frames:]:
        if record.is_forward is False:
            continue
        if shapes is None:
            shapes = call_shapes(args, kwargs)
        guard = record.recompile_reason or ""
        NUMBERS.look_at_reason(guard, f"{component} {region}")
        seconds = (record.duration_us or 0) / 1e6
        if record.fail_type is not None:
            if "recompile limit" in (record.fail_reason or "").partition("\n")[0]:
                LOG.record("recompile limit", component, region, shapes=shapes, reason=guard, seconds=seconds)
            # Other failures are graph breaks, which torch gets over, or errors, which the call raises.
        elif record.graph_op_count:
            kind: Kind = "recompilation" if guard else "compilation"
            LOG.record(kind, component, region, shapes=shapes, reason=guard, seconds=seconds)
            graphs += 1
    return graphs


def call_shapes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """Describe the tensors of a call: `x: bfloat16[1, 4096, 3072]`."""
    named = [*((str(i), value) for i, value in enumerate(args)), *kwargs.items()]
    found = (f"{name}: {_described(tensor)}" for name, value in named for tensor in _tensors(value))
    return tuple(shape for shape, _ in zip(found, range(_MOST_SHAPES), strict=False))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
