"""From samples to figures: median, p95, and within what noise they hold.

The noise of a median is the larger one of two half-widths, as a share of it: that of its 95 % confidence interval by
order statistics, which assumes no distribution, and that of the medians of the blocks, which sees what changes from one
start of a server to the next. With fewer than six samples the interval is all of their range.

The noise of two arms is the sum of theirs. A difference is the share of the slower one's time that the faster one
saves, and counts only if it is larger than that.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_omni_diffusion_compile.bench.result import Result, Start

_FAMILY = "vllm_omni:diffusion_compile_"
_OUTSIDE = 0.025


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Of one shape, in seconds.

    Args:
        median: Of all requests but the first ones.
        p95: Of the same, linear between the two nearest samples.
        noise: Of the median, as a share of it.
        count: So many samples.
        first_cold: The first request after a cold start.
        first_warm: The median of those after warm starts; None if there were none.
    """

    median: float
    p95: float
    noise: float
    count: int
    first_cold: float | None
    first_warm: float | None


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What one start compiled, as the server counts it.

    Args:
        before: Graphs made before it was ready.
        before_s: Seconds spent on them.
        after: Graphs made after that: a request waited for each.
        fallbacks: Regions that run eagerly, since compiling failed or was done too often.
    """

    before: int
    before_s: float
    after: int
    fallbacks: int


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of one arm.

    Args:
        name: Of the arm.
        ready_cold_s: With an empty compile cache; None if it was not measured.
        ready_warm_s: With the cache of the cold start, the median of such starts.
        shapes: By number of the shape, those that have samples.
        cold: What the cold start compiled; None if the server did not count.
        warm: The same of the last warm start.
        peak_memory_mb: Most that any request needed; None if the server does not say.
        complete: Whether everything was measured.
    """

    name: str
    ready_cold_s: float | None
    ready_warm_s: float | None
    shapes: Mapping[int, Latency]
    cold: Compiled | None
    warm: Compiled | None
    peak_memory_mb: float | None
    complete: bool


def figures(result: Result) -> list[Figures]:
    """Return the figures of every arm, in the order of the result."""
    return [
        _figures(entry.name, result.starts_of(entry.name), len(result.plan.shapes), entry.not_measured is None)
        for entry in result.arms
    ]


def _figures(name: str, starts: Sequence[Start], shapes: int, complete: bool) -> Figures:
    ready = {cold: [s.ready_s for s in starts if s.cold is cold and s.ready_s is not None] for cold in (True, False)}
    latencies = {
        shape: _latency(starts, shape)
        for shape in range(shapes)
        if any(sample.shape == shape and not sample.first for start in starts for sample in start.samples)
    }
    memory = [s.peak_memory_mb for start in starts for s in start.samples if s.peak_memory_mb is not None]
    return Figures(
        name=name,
        ready_cold_s=ready[True][0] if ready[True] else None,
        ready_warm_s=statistics.median(ready[False]) if ready[False] else None,
        shapes=latencies,
        cold=next((_compiled(start) for start in starts if start.cold and start.samples), None),
        warm=next((_compiled(start) for start in reversed(starts) if not start.cold and start.samples), None),
        peak_memory_mb=max(memory, default=None),
        complete=complete and bool(starts) and len(latencies) == shapes,
    )


def _latency(starts: Sequence[Start], shape: int) -> Latency:
    blocks: dict[int, list[float]] = defaultdict(list)
    first: dict[bool, list[float]] = {True: [], False: []}
    for start in starts:
        for sample in start.samples:
            if sample.shape == shape:
                (first[start.cold] if sample.first else blocks[sample.block]).append(sample.seconds)
    seconds = sorted(second for block in blocks.values() for second in block)
    return Latency(
        median=statistics.median(seconds),
        p95=quantile(seconds, 0.95),
        noise=noise(list(blocks.values())),
        count=len(seconds),
        first_cold=first[True][0] if first[True] else None,
        first_warm=statistics.median(first[False]) if first[False] else None,
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which a share of ordered samples lies, linear between the two nearest."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def noise(blocks: Sequence[Sequence[float]]) -> float:
    """Return the noise of the median of all samples, as a share of it.

    Args:
        blocks: Samples of each block; there is at least one sample.
    """
    ordered = sorted(seconds for block in blocks for seconds in block)
    middle = statistics.median(ordered)
    left_out = _left_out(len(ordered))
    low, high = ordered[left_out], ordered[-1 - left_out]
    medians = [statistics.median(block) for block in blocks if block]
    return max(high - low, max(medians) - min(medians)) / 2 / middle


def _left_out(count: int) -> int:
    """Return how many samples at each end are outside of the 95 % interval of the median."""
    below, cumulated = 0, 1 / 2**count
    while cumulated <= _OUTSIDE:
        below += 1
        cumulated += math.comb(count, below) / 2**count
    # `below` samples or fewer lie on one side of the true median with a probability above the limit: one fewer is safe.
    return max(below - 1, 0)


def _compiled(start: Start) -> Compiled | None:
    """Add up what a server says; None if it says nothing of compilation, as an eager one does."""

    def total(name: str, **labels: str) -> float:
        return sum(
            metric.value
            for metric in start.metrics
            if metric.name == f"{_FAMILY}{name}_total" and labels.items() <= metric.labels.items()
        )

    if not start.metrics:
        return None
    return Compiled(
        before=round(total("compilations", after_ready="false")),
        before_s=total("s", after_ready="false"),
        after=round(total("compilations", after_ready="true")),
        fallbacks=round(total("fallbacks") + total("recompile_limit")),
    )


def ratio(arm: Figures, base: Figures) -> float:
    """Return how much longer a request of one arm takes than of another: the geometric mean over common shapes."""
    common = arm.shapes.keys() & base.shapes.keys()
    return statistics.geometric_mean(arm.shapes[shape].median / base.shapes[shape].median for shape in common)


def joint_noise(one: Figures, other: Figures) -> float:
    """Return the noise of a ratio of two arms: the sum of theirs, each the mean over the shapes."""
    common = one.shapes.keys() & other.shapes.keys()
    return sum(statistics.fmean(arm.shapes[shape].noise for shape in common) for arm in (one, other))


def slower(arm: Figures, base: Figures) -> bool:
    """Whether requests of an arm take longer than those of another, by more than noise."""
    return 1 - ratio(base, arm) > joint_noise(arm, base)
