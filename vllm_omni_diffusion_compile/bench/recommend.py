"""What to serve with, from what was measured alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_omni_diffusion_compile.bench.arms import EAGER, as_flags, pasted
from vllm_omni_diffusion_compile.bench.figures import Figures, figures, joint_noise, ratio, slower
from vllm_omni_diffusion_compile.bench.result import Result
from vllm_omni_diffusion_compile.settings import CONFIG


@dataclass(frozen=True)
class Recommendation:
    """What to do.

    Args:
        arm: Name of the arm; None if nothing can be recommended.
        sentences: What it rests on, and what to know.
        command: What to type; None with no arm.
    """

    arm: str | None
    sentences: tuple[str, ...]
    command: str | None = None


def recommend(result: Result) -> Recommendation:
    """Recommend an arm.

    Only arms count that were measured completely. Of those that no other one beats by more than noise it is eager,
    since it starts soonest and has the least that can fail; else one that compiled nothing after it was ready and fell
    back nowhere; else the one that is ready soonest with a warm cache. RainFusion is never weighed against what it
    approximates: what it saves is said, and whether its output is good enough is for a person to see.
    """
    measured = [arm for arm in figures(result) if arm.complete]
    left_out = tuple(
        f"{entry.name} is out of account: it was not measured completely."
        for entry in result.arms
        if entry.not_measured
    )
    dense = [arm for arm in measured if not _is_sparse(arm)] or measured
    if len(measured) < 2:
        what = f"only {measured[0].name} was measured completely" if measured else "no arm was measured completely"
        return Recommendation(None, (f"Nothing is recommended: {what}.", *left_out))
    best = min(
        (arm for arm in dense if not any(slower(arm, other) for other in dense)),
        key=lambda arm: (not arm.name.startswith(EAGER), _troubles(arm) > 0, arm.ready_warm_s or 0.0),
    )
    sentences = [*_why(best, dense, result), *_troubled(best), *_sparse(best, measured), *left_out]
    return Recommendation(best.name, tuple(sentences), command(result, best.name))


def command(result: Result, name: str) -> str:
    """Return what to type for an arm, with the shapes declared as they were measured."""
    flags = next(entry.flags for entry in result.arms if entry.name == name)
    shapes = [shape.model_dump(mode="json", exclude_defaults=True) for shape in result.plan.shapes]
    short = [str(shape) if set(dumped) <= {"width", "height", "frames"} else dumped
             for shape, dumped in zip(result.plan.shapes, shapes, strict=True)]  # fmt: skip
    declared = [] if name.startswith(EAGER) else as_flags({CONFIG: {"warmup": {"shapes": short}}})
    return pasted(["vllm", "serve", result.plan.model, "--omni", *flags, *declared])


def _why(best: Figures, arms: Sequence[Figures], result: Result) -> list[str]:
    base = next((arm for arm in arms if arm.name.startswith(EAGER)), None)
    others = [arm for arm in arms if arm is not best]
    if not others:
        return [f"{best.name} is the only arm that computes dense attention; there is nothing to weigh it against."]
    if base is best:
        nearest = min(others, key=lambda arm: ratio(arm, best))
        if slower(nearest, best):
            return [f"{best.name} is best: {_compared(nearest, best)}."]
        return [
            f"{best.name}: the difference is within noise ({_compared(nearest, best)}), and it has nothing to compile.",
            "More --requests, or --together, may tell them apart.",
        ]
    said = [f"{best.name}: {_compared(best, base)}." if base else f"{best.name}."]
    if base:
        said += _pays(best, base) + _exceptions(best, base, result)
    else:
        slowest = max(others, key=lambda arm: ratio(arm, best))
        said.append(
            f"Eager was not measured, so whether compiling pays at all is not known; {_compared(slowest, best)}."
        )
    equal = [arm for arm in others if arm is not base and not slower(arm, best)]
    said += [f"{arm.name} is not told apart from it: {_compared(arm, best)}." for arm in equal]
    return said


def _compared(arm: Figures, base: Figures) -> str:
    faster, other = (arm, base) if ratio(arm, base) <= 1 else (base, arm)
    return (
        f"a request to {faster.name} takes {1 - ratio(faster, other):.1%} less time than to {other.name}, "
        f"with a noise of {joint_noise(arm, base):.1%}"
    )


def _pays(arm: Figures, base: Figures) -> list[str]:
    """Say after how many requests the longer start is made up for."""
    saved = sum(base.shapes[shape].median - arm.shapes[shape].median for shape in base.shapes) / len(base.shapes)
    parts = [
        f"{ours - theirs:.0f} s longer {when}, made up for after {round((ours - theirs) / saved)} requests"
        for when, ours, theirs in (
            ("cold", arm.ready_cold_s, base.ready_cold_s),
            ("warm", arm.ready_warm_s, base.ready_warm_s),
        )
        if ours is not None and theirs is not None and ours > theirs and saved > 0
    ]
    shapes = " of all shapes alike" if len(base.shapes) > 1 else ""
    return [f"Its start takes {'; '.join(parts)}{shapes}."] if parts else []


def _exceptions(arm: Figures, base: Figures, result: Result) -> list[str]:
    said = []
    for number, latency in arm.shapes.items():
        other = base.shapes[number]
        lost = 1 - other.median / latency.median
        if lost > latency.noise + other.noise:
            where = result.plan.shapes[number]
            said.append(f"At {where} {base.name} takes {lost:.1%} less time than {arm.name}, outside of noise.")
    return said


def _troubles(arm: Figures) -> int:
    return sum(compiled.after + compiled.fallbacks for compiled in (arm.cold, arm.warm) if compiled is not None)


def _troubled(arm: Figures) -> list[str]:
    if not _troubles(arm):
        return []
    after = sum(compiled.after for compiled in (arm.cold, arm.warm) if compiled is not None)
    fallbacks = sum(compiled.fallbacks for compiled in (arm.cold, arm.warm) if compiled is not None)
    what = f"{arm.name} compiled {after} graph(s) after it was ready and fell back to eager {fallbacks} time(s)"
    return [f"Mind that {what}: the report on its start, in the JSON, names what to declare."]


def _is_sparse(arm: Figures) -> bool:
    return arm.name.endswith("+rainfusion")


def _sparse(best: Figures, measured: Sequence[Figures]) -> list[str]:
    """Say what block-sparse attention saves; it is not chosen by time alone."""
    if _is_sparse(best):
        return ["Its attention is block-sparse, so its video is another one: look at it before you serve it."]
    sparse = [arm for arm in measured if _is_sparse(arm) and slower(best, arm)]
    return [
        f"{arm.name} is faster ({_compared(arm, best)}), but its video is another one: look at it before you serve it."
        for arm in sorted(sparse, key=lambda arm: ratio(arm, best))[:1]
    ]
