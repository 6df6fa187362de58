"""The run itself: which arm is started when, what it is asked, and when to stop.

Rounds. Every arm is started cold, in the order given; then warm, in reverse: A B C, C B A. Whatever drifts steadily, as
a machine that warms up, then hits all arms alike. One server runs at a time, since two may not fit on a device; a block
is what one start is asked. With `together` the warm servers run at once, and each request is sent to one after the
other: that takes memory, and tells smaller differences apart.

Budget. A cold start may take as much of what is left as leaves the starts that are still due, of earlier arms and its
own; of an arm that compiles, a warm start is taken to last at most 0.6 of the cold one. What does not fit is ended and
named.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from vllm_omni_diffusion_compile.bench.arms import EAGER, Arm, as_flags, given
from vllm_omni_diffusion_compile.bench.asking import PATHS, encoded
from vllm_omni_diffusion_compile.bench.result import ArmEntry, Metric, Result, Sample, Start
from vllm_omni_diffusion_compile.bench.server import OutOfTimeError, Server
from vllm_omni_diffusion_compile.errors import BenchError
from vllm_omni_diffusion_compile.settings import CONFIG, merged

# Where a server has the report on its start.
REPORT = "/v1/diffusion_compile/report"
# The program that answers requests with `Omni`.
OFFLINE = "vllm_omni_diffusion_compile.bench_offline"
_NO_TIME = "no time was left for it beside the other arms"
# Of a cold start that compiles; 0.3 to 0.56 were seen on machines of two cores.
_WARM_SHARE = 0.6
_METRIC = re.compile(r"^(vllm_omni:diffusion_compile_\w+_total)\{(.*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
# What our attention backend logs, once for each reason.
_STAYED_DENSE = re.compile(r"RAINFUSION_ATTN stays dense: (.*)\.$")
_MEMORY = re.compile(r"^vllm_omni:peak_memory_mb(?:\{.*\})? (\S+)$", re.MULTILINE)

Show = Callable[[str, str], None]
"""Told the name of an arm and what it does; called a few times a second."""


class BudgetSpentError(BenchError):
    """An arm does not fit in the budget."""


@dataclass
class _Member:
    """An arm, one start of it, and its server."""

    arm: Arm
    start: Start
    server: Server
    limit: float


@dataclass
class Run:
    """One run, from a result without starts to one with all of them.

    Args:
        result: Filled in while it runs.
        arms: In the order of the result.
        vllm: The program `vllm`.
        caches: Folder for the compile caches of the arms; private.
        logs: Folder for the logs of the servers; private.
        show: Told what happens.
        asked: Called after each request.
        save: Called with the result after each start, so that what was measured is not lost with what comes after.
    """

    result: Result
    arms: Sequence[Arm]
    vllm: str
    caches: Path
    logs: Path
    show: Show
    asked: Callable[[], None]
    save: Callable[[Result], None]
    _spent: dict[str, float] = field(default_factory=dict)
    _began: float = field(default_factory=time.monotonic)

    def run(self) -> None:
        """Run every round."""
        plan = self.result.plan
        for number in range(1 if plan.together else plan.rounds):
            for arm in self.arms[:: -1 if number % 2 else 1]:
                if self._fit(arm):
                    self._alone(arm, number)
        if plan.together:
            self._together([arm for arm in reversed(self.arms) if self._fit(arm)])
        self._saved()

    def _alone(self, arm: Arm, number: int) -> None:
        began = time.monotonic()
        plan = self.result.plan
        member = self._member(arm, number)
        with self._written_down(member):
            self._become_ready(member)
            for shape in range(len(plan.shapes)):
                self._ask(member, shape, block=number, first=True)
            for turn in range(0 if plan.together else plan.requests):
                for shape in self._shapes(turn):
                    self._ask(member, shape, block=number, first=False)
            self._collect(member)
            member.server.close()
        self._spent[arm.name] = max(self._spent.get(arm.name, 0.0), time.monotonic() - began)
        self._saved()

    def _together(self, arms: Sequence[Arm]) -> None:
        plan = self.result.plan
        with ExitStack() as stack:
            members = [self._member(arm, 1) for arm in arms]
            for member in members:
                stack.callback(member.server.close)
                with self._written_down(member):
                    self._become_ready(member)
            for shape in range(len(plan.shapes)):
                self._each(members, shape, block=0, first=True)
            for turn in range(plan.requests * plan.rounds):
                for shape in self._shapes(turn):
                    # Who begins changes, so that none always runs in another's wake.
                    self._each(members[:: -1 if turn % 2 else 1], shape, block=turn // plan.requests, first=False)
            for member in _alive(members):
                self._collect(member)

    def _each(self, members: Sequence[_Member], shape: int, *, block: int, first: bool) -> None:
        for member in _alive(members):
            with self._written_down(member):
                self._ask(member, shape, block=block, first=first)

    def _shapes(self, turn: int) -> Sequence[int]:
        return range(len(self.result.plan.shapes))[:: -1 if turn % 2 else 1]

    def _member(self, arm: Arm, number: int) -> _Member:
        """Make the server of an arm, without starting it."""
        command = self._command(arm)
        server = Server(command, log=self.logs / f"{arm.name}-{number}.log", working=self.caches)
        start = Start(arm=arm.name, cold=number == 0, at=time.time(), command=server.command, environment={})
        return _Member(arm, start, server, time.monotonic() + self._share(arm, cold=number == 0))

    def _command(self, arm: Arm) -> list[str]:
        plan = self.result.plan
        cache = self.caches / arm.name
        cache.mkdir(mode=0o700, exist_ok=True)
        shapes = [shape.model_dump(mode="json", exclude_defaults=True) for shape in plan.shapes]
        config = {CONFIG: {"cache_dir": str(cache), "warmup": {"shapes": shapes}}}
        if plan.offline:
            settings = arm.settings | merged(given(plan.arguments), config)
            return [sys.executable, "-m", OFFLINE, plan.model, json.dumps(settings), "--task", plan.task]
        # Before the user's, which win. A slow machine compiles for longer than vLLM-Omni waits for a stage.
        patience = as_flags({name: round(plan.ready_timeout_s) for name in ("stage_init_timeout", "init_timeout")})
        ours = [*as_flags(arm.settings), *as_flags(config)]
        return [self.vllm, "serve", plan.model, "--omni", *patience, *ours, *plan.arguments]

    def _share(self, arm: Arm, *, cold: bool) -> float:
        """Seconds that a start, with all that it is asked, may take."""
        plan = self.result.plan
        starts = 2 if plan.together else plan.rounds
        due = sum(
            self._spent[other.name] * _warm_share(other) * (starts - len(self.result.starts_of(other.name)))
            for other in self.arms
            if other != arm and other.name in self._spent and self._fit(other)
        )
        return (self._left() - due) / (1 + _warm_share(arm) * (starts - 1) if cold else 1)

    def _left(self) -> float:
        budget = self.result.plan.budget_s
        return float("inf") if budget is None else budget - (time.monotonic() - self._began)

    def _become_ready(self, member: _Member) -> None:
        patience_s = self.result.plan.ready_timeout_s
        left = self._left_for(member)
        member.start.at = time.time()
        member.server.start()
        member.start.environment = member.server.environment
        try:
            member.start.ready_s = member.server.wait_ready(
                min(patience_s, left), lambda message: self._show(member, message)
            )
        except OutOfTimeError as error:
            if left < patience_s:
                raise BudgetSpentError(str(error)) from None
            raise OutOfTimeError(f"{error} (--ready-timeout)") from None

    def _ask(self, member: _Member, shape: int, *, block: int, first: bool) -> None:
        plan, start = self.result.plan, member.start
        self._show(member, f"{'first request' if first else 'requests'} of {plan.shapes[shape]}")
        left = self._left_for(member)
        path = "/generate" if plan.offline else PATHS[plan.task]
        body, content_type = encoded(plan.bodies[shape], "image" if plan.offline else plan.task)
        at = time.time()
        try:
            seconds = member.server.ask(path, body, content_type, min(left, plan.ready_timeout_s))
        except OutOfTimeError as error:
            raise BudgetSpentError(_NO_TIME) if left < plan.ready_timeout_s else error from None
        self.asked()
        memory = [float(value) for value in _MEMORY.findall(member.server.metrics())]
        start.samples.append(
            Sample(
                shape=shape, first=first, block=block, at=at, seconds=seconds,
                peak_memory_mb=max(memory, default=0.0) or None,
            )
        )  # fmt: skip

    def _collect(self, member: _Member) -> None:
        member.start.metrics = [
            Metric(name=name, labels=dict(_LABEL.findall(labels)), value=float(value))
            for name, labels, value in _METRIC.findall(member.server.metrics())
        ]
        report = member.server.document(REPORT)
        member.start.report = report if isinstance(report, dict) and "shapes" in report else None
        if member.arm.rainfusion:
            member.start.stayed_dense = member.server.logged(_STAYED_DENSE)

    @contextmanager
    def _written_down(self, member: _Member) -> Iterator[None]:
        """End an arm on what goes wrong, with the reason, and go on with the others; nothing outlives an interrupt."""
        if member.start not in self.result.starts:
            self.result.starts.append(member.start)
        try:
            yield
        except BaseException as error:
            tail = member.server.tail()  # before it says how it ends
            # If it cannot be stopped, that ends the bench: nothing can be measured beside it.
            member.server.close()
            if not isinstance(error, BenchError):
                raise
            member.start.failed = str(error)
            member.start.log_tail = None if isinstance(error, BudgetSpentError) else tail
            reason = f"{error}, in its {'cold' if member.start.cold else 'warm'} start"
            if isinstance(error, BudgetSpentError):
                reason = f"--budget {self.result.plan.budget_s:g} does not suffice: {reason}"
            self._entry(member.arm.name).not_measured = reason

    def _left_for(self, member: _Member) -> float:
        left = member.limit - time.monotonic()
        if left <= 0:
            raise BudgetSpentError(_NO_TIME)
        return left

    def _show(self, member: _Member, message: str) -> None:
        self.show(f"{member.arm.name}, {'cold' if member.start.cold else 'warm'}", message)

    def _fit(self, arm: Arm) -> bool:
        return self._entry(arm.name).not_measured is None

    def _entry(self, name: str) -> ArmEntry:
        return next(entry for entry in self.result.arms if entry.name == name)

    def _saved(self) -> None:
        self.result.seconds = time.monotonic() - self._began
        self.save(self.result)


def _warm_share(arm: Arm) -> float:
    return 1.0 if arm.scope == EAGER else _WARM_SHARE


def _alive(members: Sequence[_Member]) -> list[_Member]:
    return [member for member in members if member.start.failed is None]
