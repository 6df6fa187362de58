"""Warmup of declared shapes: each through the ordinary request path until it compiles nothing, within a budget."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from vllm_omni_diffusion_compile.settings import Shape

State = Literal["warm", "unsettled", "failed", "gave up", "skipped"]

# Requests of one shape: a dynamic graph is there after the second, and the third shows that it was enough.
MOST_REQUESTS = 4
# Denoise steps where a shape states none; a model that refuses as few is asked with its own number.
FEW_STEPS = 2
# Pixels of a side where a shape leaves its size to the model, to guess how long it takes: what most image models do.
_SIDE = 1024
# What did not fit would not fit with more steps either.
_MEMORY = re.compile(r"out ?of ?memory", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What became of one request.

    Args:
        error: Why it failed; None if it did not.
        gave_up: Whether it was still running when its time was up.
        graphs: Graphs compiled while it ran, inside and outside of the regions; None if the workers cannot be asked.
        compile_events: Compilations and recompilations of regions.
        compile_s: Seconds that torch spent on those.
        preparation_s: From handing it to the engine until a worker began, in seconds.
        execution_s: What the worker took, compiling included.
        transport_s: From then until the engine had the output and had made it ready to hand on.
        peak_memory_mb: Of the device, as the host reports it; None where it reports none.
        stages: Seconds by the host's own name of a stage, where its pipeline profiler is on.
        prompt_rows: Tokens of its prompt, as counted by the model's own tokenizer; None if it has none.
    """

    error: str | None = None
    gave_up: bool = False
    graphs: int | None = None
    compile_events: int | None = None
    compile_s: float | None = None
    preparation_s: float | None = None
    execution_s: float | None = None
    transport_s: float | None = None
    peak_memory_mb: float | None = None
    stages: Mapping[str, float] = field(default_factory=dict)
    prompt_rows: int | None = None


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Where the seconds of one request went; None for what is not known.

    Args:
        total_s: All of it, without HTTP.
        preparation_s: See `Answer`.
        compile_s: See `Answer`.
        execution_s: What the worker took beside compiling.
        transport_s: See `Answer`.
        stages: See `Answer`.
    """

    total_s: float
    preparation_s: float | None
    compile_s: float | None
    execution_s: float | None
    transport_s: float | None
    stages: Mapping[str, float]

    @classmethod
    def of(cls, answer: Answer, total_s: float) -> Timing:
        """Take the compiler's share out of the execution."""
        execution_s = answer.execution_s
        if execution_s is not None and answer.compile_s is not None:
            execution_s = max(0.0, execution_s - answer.compile_s)
        return cls(
            total_s=total_s,
            preparation_s=answer.preparation_s,
            compile_s=answer.compile_s,
            execution_s=execution_s,
            transport_s=answer.transport_s,
            stages=dict(answer.stages),
        )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one declared shape.

    Args:
        shape: As it was declared.
        state: `warm`: its last request compiled nothing, as far as is known; `unsettled`: its last request
            still compiled; `failed`; `gave up`: a request was still running when the budget was spent; `skipped`.
        reason: For all but `warm`.
        requests: How many were sent.
        cold: Of the first request that succeeded.
        warm: Of the last one, if it is known to have compiled nothing; the model's cost without the compiler.
        compile_events: In all of its requests.
        compile_s: The same, in seconds.
        peak_memory_mb: The most that one of them took.
        prompt_rows: See `Answer`.
    """

    shape: Shape
    state: State
    reason: str = ""
    requests: int = 0
    cold: Timing | None = None
    warm: Timing | None = None
    compile_events: int | None = None
    compile_s: float | None = None
    peak_memory_mb: float | None = None
    prompt_rows: int | None = None

    @property
    def succeeded(self) -> bool:
        """Whether a request of this shape was answered."""
        return self.state in ("warm", "unsettled")

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self) | {"shape": self.shape.model_dump(mode="json", exclude_unset=True), "name": str(self.shape)}


# Sends a request of a shape with so many steps (None: the model's own) and waits so many seconds (None: for good).
Send = Callable[[Shape, "int | None", "float | None"], Answer]


class Budget:
    """The seconds that warming up may take.

    Args:
        seconds: None for as many as it takes.
        clock: For tests.
    """

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._start = clock()

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._start

    @property
    def left(self) -> float | None:
        """Seconds that are left, at least 0; None without a limit."""
        return None if self.seconds is None else max(0.0, self.seconds - self.spent)


def warm_shapes(
    shapes: Sequence[Shape],
    send: Send,
    budget: Budget,
    *,
    begin: Callable[[Shape], None] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Outcome]:
    """Warm shapes in the order in which they were declared.

    Args:
        shapes: What was declared.
        send: See `Send`.
        budget: A shape that would not fit into what is left is skipped.
        begin: Told of each shape before its first request.
        stop: Whether to send nothing any more.

    Yields:
        One outcome a shape, when it is known.
    """
    last: Outcome | None = None
    busy = ""
    for shape in shapes:
        reason = busy or ("the server was told to stop" if stop() else _does_not_fit(shape, last, budget))
        if reason:
            yield Outcome(shape=shape, state="skipped", reason=reason)
            continue
        begin(shape)
        outcome = _warm(shape, send, budget, stop)
        if outcome.cold is not None:
            last = outcome
        if outcome.state == "gave up":
            busy = f"the engine is still busy with {shape}"
        yield outcome


def _does_not_fit(shape: Shape, last: Outcome | None, budget: Budget) -> str:
    """Say why a shape is skipped; empty if it is tried.

    The last shape tells what to expect: as much compiling, and the rest in proportion to the pixels.
    """
    left = budget.left
    if left is None:
        return ""
    if left == 0:
        return f"the budget of {budget.seconds:g} s is spent"
    if last is None or last.cold is None:
        return ""
    compile_s = last.cold.compile_s or 0.0
    expected = compile_s + (last.cold.total_s - compile_s) * _work(shape) / _work(last.shape)
    if expected <= left:
        return ""
    return f"it would take about {expected:.0f} s, and {left:.0f} s of {budget.seconds:g} s are left"


def _work(shape: Shape) -> int:
    width, height = shape.width or _SIDE, shape.height or _SIDE
    return width * height * (shape.frames or 1) * (shape.steps or FEW_STEPS)


def _warm(shape: Shape, send: Send, budget: Budget, stop: Callable[[], bool]) -> Outcome:
    sent: list[tuple[Answer, float]] = []

    def outcome(state: State, reason: str = "") -> Outcome:
        done = [(answer, seconds) for answer, seconds in sent if answer.error is None and not answer.gave_up]
        last = done[-1] if done and done[-1][0].graphs == 0 else None
        return Outcome(
            shape=shape,
            state=state,
            reason=reason,
            requests=len(sent),
            cold=Timing.of(*done[0]) if done else None,
            warm=Timing.of(*last) if last else None,
            compile_events=_total([answer.compile_events for answer, _ in sent]),
            compile_s=_total([answer.compile_s for answer, _ in sent]),
            peak_memory_mb=max((answer.peak_memory_mb or 0.0 for answer, _ in sent), default=0.0) or None,
            prompt_rows=sent[-1][0].prompt_rows if sent else None,
        )

    def request(steps: int | None) -> Answer:
        start = time.perf_counter()
        answer = send(shape, steps, budget.left)
        sent.append((answer, time.perf_counter() - start))
        return answer

    steps: int | None = FEW_STEPS if shape.steps is None else shape.steps
    answer = request(steps)
    if shape.steps is None and answer.error is not None and not _MEMORY.search(answer.error):
        steps = None
        answer = request(steps)
    if answer.gave_up:
        return outcome("gave up", _gave_up(budget))
    if answer.error is not None:
        return outcome("failed", answer.error)
    if answer.graphs == 0:
        return outcome("warm")
    most = len(sent) + MOST_REQUESTS - 1
    while len(sent) < most:
        # Hoped for is a request that compiles nothing; one that does is given up when the budget is spent.
        expected = sent[-1][1] - (answer.compile_s or 0.0)
        if (budget.left is not None and expected > budget.left) or stop():
            return outcome("unsettled" if answer.graphs else "warm", "no time for another request")
        answer = request(steps)
        if answer.gave_up:
            return outcome("gave up", _gave_up(budget))
        if answer.error is not None:
            return outcome("failed", answer.error)
        if not answer.graphs:
            return outcome("warm")
    return outcome("unsettled", f"each of {len(sent)} requests compiled something")


def _gave_up(budget: Budget) -> str:
    return f"it was still running when the budget of {budget.seconds:g} s was spent"


def _total(values: Sequence[Any]) -> Any:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
