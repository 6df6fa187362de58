"""The plot of a run: time to ready, and latency of each shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_omni_diffusion_compile.bench.figures import Figures, figures
from vllm_omni_diffusion_compile.bench.result import Result
from vllm_omni_diffusion_compile.errors import BenchError

_COLD, _WARM = "#4477aa", "#ccbb44"
_SHAPES = ("#228833", "#aa3377", "#66ccee", "#ee6677", "#bbbbbb")


def check() -> None:
    """Say before anything runs that a plot cannot be drawn.

    Raises:
        BenchError: matplotlib is missing.
    """
    try:
        import matplotlib as mpl  # noqa: F401
    except ImportError as error:
        raise BenchError(
            f"--plot needs matplotlib ({error}); install it, or this package with its extra: "
            "pip install 'vllm-omni-diffusion-compile[plot]'"
        ) from None


def draw(result: Result, path: Path) -> None:
    """Draw a run as a PNG file.

    Raises:
        BenchError: The file cannot be written.
    """
    check()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    arms = figures(result)
    figure = Figure(figsize=(10, 1.6 + 0.75 * len(arms)), layout="constrained")
    FigureCanvasAgg(figure)
    ready, latency = figure.subplots(1, 2, sharey=True)
    _draw_ready(ready, arms)
    _draw_latency(latency, arms, result)
    ready.set_yticks(range(len(arms)), [arm.name for arm in arms])
    ready.invert_yaxis()
    figure.suptitle(f"{Path(result.plan.model).name}: arms side by side", fontsize=11)
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise BenchError(f"--plot {path}: {error.strerror or error}") from None


def _draw_ready(axes: Any, arms: list[Figures]) -> None:
    for place, (label, color) in enumerate((("cold cache", _COLD), ("warm cache", _WARM))):
        seconds = [(arm.ready_warm_s if place else arm.ready_cold_s) or 0.0 for arm in arms]
        axes.barh([row + 0.4 * place - 0.2 for row in range(len(arms))], seconds, 0.36, color=color, label=label)
    axes.set(xlabel="seconds to ready")
    axes.legend(fontsize=8)


def _draw_latency(axes: Any, arms: list[Figures], result: Result) -> None:
    """Draw medians with their noise, p95 as a mark, and the samples themselves."""
    count = len(result.plan.shapes)
    height = 0.8 / count
    for number, shape in enumerate(result.plan.shapes):
        color = _SHAPES[number % len(_SHAPES)]
        for row, arm in enumerate(arms):
            if number not in arm.shapes:
                continue
            latency, y = arm.shapes[number], row + height * (number + 0.5) - 0.4
            label = str(shape) if row == next(i for i, a in enumerate(arms) if number in a.shapes) else None
            error = latency.median * latency.noise
            axes.barh(y, latency.median, height * 0.9, xerr=error, color=color, alpha=0.6, label=label, capsize=2)
            axes.plot(latency.p95, y, marker="|", markersize=10, color="black")
            samples = [
                sample.seconds
                for start in result.starts_of(arm.name)
                for sample in start.samples
                if sample.shape == number and not sample.first
            ]
            axes.plot(samples, [y] * len(samples), linestyle="", marker=".", markersize=3, color="black", alpha=0.4)
    axes.set(xlabel="seconds a request:\nmedian ± noise, samples, p95 as a bar")
    axes.legend(fontsize=8)
