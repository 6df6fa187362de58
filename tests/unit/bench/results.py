"""Results made by hand, for figures that can be worked out on paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllm_omni_diffusion_compile.bench.arms import as_flags, read_arms
from vllm_omni_diffusion_compile.bench.result import ArmEntry, Metric, Plan, Result, Sample, Start
from vllm_omni_diffusion_compile.settings import Shape

# Seconds of the requests of each shape, by block.
Blocks = Sequence[Sequence[Sequence[float]]]


def result(arms: Mapping[str, Blocks], ready: Mapping[str, tuple[float, float]] | None = None) -> Result:
    """A run in two rounds; `arms` has the seconds by shape and block."""
    shapes = max((len(blocks) for blocks in arms.values()), default=1)
    entries = [
        ArmEntry(name=name, flags=as_flags(arm.settings)) for name, arm in zip(arms, read_arms(list(arms)), strict=True)
    ]
    made = Result(
        command=["vllm-omni-compile", "bench"],
        began_at=1.0,
        seconds=9.0,
        versions={"vllm-omni": "0.30.0"},
        hardware={"gpus": [], "cpu": "a cpu", "cpus": 2},
        plan=Plan(
            model="MODEL",
            task="image",
            task_from="--task says so",
            shapes=[Shape(width=64 * (number + 1), height=64) for number in range(shapes)],
            bodies=[{}] * shapes,
            requests=2,
            rounds=2,
            together=False,
            offline=False,
            arguments=[],
            seed=1,
            budget_s=None,
            ready_timeout_s=60,
        ),
        arms=entries,
    )
    for name, blocks in arms.items():
        for number, ready_s in enumerate((ready or {}).get(name, (20.0, 10.0))):
            made.starts.append(start(name, number, ready_s, [shape[number] for shape in blocks]))
    return made


def start(name: str, number: int, ready_s: float, seconds: Sequence[Sequence[float]]) -> Start:
    return Start(
        arm=name,
        cold=number == 0,
        at=1.0,
        command=["vllm"],
        environment={},
        ready_s=ready_s,
        samples=[
            sample
            for shape, block in enumerate(seconds)
            for sample in (
                Sample(shape=shape, first=True, block=number, at=1.0, seconds=7.0 - number, peak_memory_mb=1024.0),
                *(Sample(shape=shape, first=False, block=number, at=2.0, seconds=each) for each in block),
            )
        ],
    )


def metric(name: str, value: float, *, after: bool) -> Metric:
    return Metric(
        name=f"vllm_omni:diffusion_compile_{name}_total",
        labels={"kind": "compilation", "after_ready": str(after).lower()},
        value=value,
    )
