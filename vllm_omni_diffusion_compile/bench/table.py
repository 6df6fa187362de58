"""The table of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from vllm_omni_diffusion_compile.bench.figures import Compiled, Figures, Latency, figures
from vllm_omni_diffusion_compile.bench.result import Result

if TYPE_CHECKING:
    from rich.table import Table

_NONE = "-"


def table(result: Result) -> Table:
    """Lay out the figures, one column an arm."""
    from rich import box
    from rich.table import Table

    plan = result.plan
    grid = Table(title=_title(result), box=box.SIMPLE_HEAD)
    grid.add_column("", overflow="fold")
    arms = figures(result)
    for arm in arms:
        grid.add_column(arm.name, justify="right", overflow="fold")
    for label, cell in _rows(result):
        grid.add_row(label, *(cell(arm) for arm in arms))
    if any(entry.not_measured for entry in result.arms):
        grid.add_row("measured", *("yes" if arm.complete else "in part" if arm.shapes else "no" for arm in arms))
    grid.caption = (
        f"Seconds; {plan.requests} request(s) of each shape in each of {plan.rounds} rounds, after the first one. "
        "Noise: of the median, by its 95 % interval and by what the rounds differ in."
        + "".join(f"\n{line}" for line in _dense(result))
    )
    return grid


def _dense(result: Result) -> Iterator[str]:
    """Tell of arms whose attention was to be block-sparse and was not always."""
    for entry in result.arms:
        reasons = dict.fromkeys(reason for start in result.starts_of(entry.name) for reason in start.stayed_dense)
        if reasons:
            why = "; ".join(reasons)
            yield f"{entry.name}: dense attention in some calls, those of the start included ({why})."


def _title(result: Result) -> str:
    plan, hardware = result.plan, result.hardware
    on = ", ".join(hardware["gpus"]) or f"{hardware['cpus']} cores of {hardware['cpu']}"
    how = "Omni" if plan.offline else "vllm serve"
    return f"{plan.model} ({plan.task}), {how} {result.versions.get('vllm-omni', '')} on {on}"


def _rows(result: Result) -> Sequence[tuple[str, Callable[[Figures], str]]]:
    rows: list[tuple[str, Callable[[Figures], str]]] = [
        ("ready, cold cache", lambda arm: _seconds(arm.ready_cold_s, 1)),
        ("ready, warm cache", lambda arm: _seconds(arm.ready_warm_s, 1)),
    ]
    for number, shape in enumerate(result.plan.shapes):
        parts: Sequence[tuple[str, Callable[[Latency], str]]] = (
            ("first request, cold", lambda latency: _seconds(latency.first_cold)),
            ("first request, warm", lambda latency: _seconds(latency.first_warm)),
            ("median", lambda latency: f"{latency.median:.3f}"),
            ("  noise", lambda latency: f"±{latency.noise:.1%}"),
            ("p95", lambda latency: f"{latency.p95:.3f}"),
        )
        rows += [(f"{shape}: {label}", _of_shape(number, cell)) for label, cell in parts]
    return [
        *rows,
        ("compile events before ready, cold", lambda arm: _before(arm.cold)),
        ("compile events before ready, warm", lambda arm: _before(arm.warm)),
        ("compile events after ready", _after),
        ("peak memory, GiB", lambda arm: _NONE if arm.peak_memory_mb is None else f"{arm.peak_memory_mb / 1024:.2f}"),
    ]  # fmt: skip


def _of_shape(number: int, cell: Callable[[Latency], str]) -> Callable[[Figures], str]:
    return lambda arm: cell(arm.shapes[number]) if number in arm.shapes else _NONE


def _seconds(value: float | None, digits: int = 3) -> str:
    return _NONE if value is None else f"{value:.{digits}f}"


def _before(compiled: Compiled | None) -> str:
    return _NONE if compiled is None else f"{compiled.before}, {compiled.before_s:.1f} s"


def _after(arm: Figures) -> str:
    counted = [compiled for compiled in (arm.cold, arm.warm) if compiled is not None]
    if not counted:
        return _NONE
    fallbacks = sum(compiled.fallbacks for compiled in counted)
    return f"{sum(compiled.after for compiled in counted)}" + (f", {fallbacks} fallback(s)" if fallbacks else "")
