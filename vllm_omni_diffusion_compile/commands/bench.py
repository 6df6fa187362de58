"""`vllm-omni-compile bench`: arms of one model side by side, on the machine at hand, and which to serve with."""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vllm_omni_diffusion_compile.bench.arms import DEFAULT, DESCRIPTION
from vllm_omni_diffusion_compile.errors import BenchError, SettingError

if TYPE_CHECKING:
    from vllm_omni_diffusion_compile.bench.arms import Arm
    from vllm_omni_diffusion_compile.bench.result import Plan, Result
    from vllm_omni_diffusion_compile.settings import Shape

HELP = (
    "measure eager, regional and full, static and dynamic, VAE decode and RainFusion side by side; say which to serve"
)

_PROMPT = "a lighthouse on a cliff, in the evening"
_DETECT = "vllm_omni_diffusion_compile.upstream.output_type"
_DETECT_S = 180.0
_INTERRUPTED = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.usage = "%(prog)s MODEL [options] [-- FLAGS of vllm serve, for every arm]\n       %(prog)s --from FILE"
    parser.add_argument("model", metavar="MODEL", nargs="?", help="as for vllm serve")
    what = parser.add_argument_group("what is measured")
    what.add_argument("--arm", metavar="NAME", action="append", help=f"{DESCRIPTION} (default: {', '.join(DEFAULT)})")
    what.add_argument(
        "--shape", metavar="SHAPE", action="append", default=[],
        help="what is asked for, and declared to every server: as in warmup.shapes, 1024x1024, 1344x768x209 with "
        "frames, or a mapping as JSON (default: 1024x1024)",
    )  # fmt: skip
    what.add_argument("--requests", metavar="N", type=int, default=10, help="of each shape in each round (default: 10)")
    what.add_argument("--steps", metavar="N", type=int, help="denoise steps (default: the model's)")
    what.add_argument("--prompt", default=_PROMPT, help=f"default: {_PROMPT}")
    what.add_argument("--seed", type=int, default=1, help="of every request (default: 1)")
    what.add_argument("--request", metavar="JSON", default="{}", help="""more fields of a request: '{"fps": 24}'""")
    what.add_argument("--task", choices=("image", "video"), help="what the model makes (default: as vLLM-Omni says)")
    how = parser.add_argument_group("how")
    how.add_argument(
        "--rounds", metavar="N", type=int, default=2,
        help="starts of each arm: one with an empty cache, the others with what it kept, in alternating order "
        "(default: 2)",
    )  # fmt: skip
    how.add_argument(
        "--together", action="store_true",
        help="have the warm servers of all arms run at once and take turns by request: tells smaller differences "
        "apart, and takes the memory of all (default: one server at a time)",
    )  # fmt: skip
    how.add_argument("--offline", action="store_true", help="measure Omni in a process of its own, not a server")
    how.add_argument("--budget", metavar="S", type=float, help="seconds for all of it; arms that do not fit are named")
    how.add_argument(
        "--ready-timeout", metavar="S", type=float, default=1800.0,
        help="seconds for one start, and for one request (default: 1800)",
    )  # fmt: skip
    output = parser.add_argument_group("output")
    output.add_argument("--json", metavar="FILE", type=Path, help="write every sample, and what it was measured with")
    output.add_argument("--plot", metavar="FILE", type=Path, help="draw times to ready and latencies (PNG)")
    output.add_argument("--logs", metavar="FOLDER", type=Path, help="keep the servers' logs there")
    output.add_argument("--from", dest="source", metavar="FILE", type=Path, help="show what --json wrote; run nothing")
    _take_rest(parser)


def _take_rest(parser: argparse.ArgumentParser) -> None:
    """Have what follows `--` become `arguments`: argparse by itself refuses it where an option stands before it."""
    parse = parser.parse_known_args

    def parse_known_args(args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        given = list(sys.argv[1:] if args is None else args)
        end = given.index("--") if "--" in given else len(given)
        options, unknown = parse(given[:end], namespace)
        options.arguments = given[end + 1 :]
        return options, unknown

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign]


def run(options: argparse.Namespace) -> int:
    """Measure and show; return 0 if every arm was measured, 1 if not, and 128 and more for a signal.

    Raises:
        BenchError: The options contradict each other or the model; nothing was started.
    """
    from vllm_omni_diffusion_compile.bench import interrupts, plot, result

    if options.plot is not None:
        plot.check()
    if options.source is not None:
        if options.model is not None:
            raise BenchError(f"--from runs nothing, so MODEL {options.model!r} has no meaning; leave one of them out")
        measured = result.read(options.source)
    else:
        if options.model is None:
            raise BenchError("MODEL is missing; name what vllm serve takes, or --from FILE to show an earlier run")
        try:
            with interrupts.raised():
                measured = _measure(options)
        except interrupts.Interrupted as interrupt:
            print(f"stopped by {interrupt}; no process is left", file=sys.stderr)
            return _INTERRUPTED + interrupt.number
    _show(measured)
    if options.json is not None:
        result.write(measured, options.json)
    if options.plot is not None:
        plot.draw(measured, options.plot)
    return 1 if any(entry.not_measured for entry in measured.arms) else 0


def _measure(options: argparse.Namespace) -> Result:
    from vllm_omni_diffusion_compile.bench import machine, result
    from vllm_omni_diffusion_compile.bench.arms import as_flags, check_arguments, given, read_arms
    from vllm_omni_diffusion_compile.bench.measure import Run
    from vllm_omni_diffusion_compile.bench.progress import Progress
    from vllm_omni_diffusion_compile.bench.server import find_vllm

    _check_numbers(options)
    arms = read_arms(options.arm or DEFAULT)
    check_arguments(options.arguments, arms)
    if options.offline:
        given(options.arguments)
    shapes = _shapes(options.shape or ["1024x1024"])
    vllm = find_vllm()
    _check_writable(options)
    task, said_by = _task(options, shapes)
    arms = read_arms(options.arm or DEFAULT, task)
    plan = _plan(options, shapes, task, said_by)
    measured = result.Result(
        command=["vllm-omni-compile", *sys.argv[1:]],
        began_at=time.time(),
        seconds=0.0,
        versions=machine.versions(),
        hardware=machine.hardware(),
        plan=plan,
        arms=[result.ArmEntry(name=arm.name, flags=[*as_flags(arm.settings), *options.arguments]) for arm in arms],
    )
    print(f"{options.model} makes {task}s: {said_by}.", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="vllm-omni-bench-", ignore_cleanup_errors=True) as folder:
        caches, logs = Path(folder, "caches"), options.logs or Path(folder, "logs")
        caches.mkdir(mode=0o700)
        logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        with Progress(_requests(plan, arms)) as progress:
            Run(
                result=measured, arms=arms, vllm=vllm, caches=caches, logs=logs, show=progress.show,
                asked=progress.advance, save=_saver(options.json),
            ).run()  # fmt: skip
    return measured


def _requests(plan: Plan, arms: Sequence[Arm]) -> int:
    starts = 2 if plan.together else plan.rounds
    return len(arms) * len(plan.shapes) * (starts + plan.requests * plan.rounds)


def _saver(path: Path | None) -> Any:
    from vllm_omni_diffusion_compile.bench import result

    return (lambda _: None) if path is None else lambda measured: result.write(measured, path)


def _check_numbers(options: argparse.Namespace) -> None:
    for name, least in (("requests", 1), ("steps", 1), ("rounds", 2), ("budget", 1), ("ready_timeout", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise BenchError(f"--{name.replace('_', '-')} is {value:g}, expected at least {least}")


def _check_writable(options: argparse.Namespace) -> None:
    """Refuse before an hour of measuring what could not be written after it."""
    for flag, path in (("--json", options.json), ("--plot", options.plot)):
        if path is not None and not path.absolute().parent.is_dir():
            raise BenchError(f"{flag} {path}: there is no folder {path.parent}; make it first")


def _shapes(texts: Sequence[str]) -> list[Shape]:
    from vllm_omni_diffusion_compile.settings import read_config

    values = [json.loads(text) if text.lstrip().startswith("{") and _is_json(text) else text for text in texts]
    try:
        shapes = read_config({"warmup": {"shapes": values}}, "--shape").warmup.shapes
    except SettingError as error:
        raise BenchError(str(error).replace("--shape.warmup.shapes", "--shape ")) from None
    for shape in shapes:
        if shapes.count(shape) > 1:
            raise BenchError(f"--shape {shape} is there twice; leave one out")
    return shapes


def _is_json(text: str) -> bool:
    with contextlib.suppress(ValueError):
        json.loads(text)
        return True
    return False


def _plan(options: argparse.Namespace, shapes: list[Shape], task: Literal["image", "video"], said_by: str) -> Plan:
    from vllm_omni_diffusion_compile.bench.asking import body
    from vllm_omni_diffusion_compile.bench.result import Plan

    try:
        more = json.loads(options.request)
    except ValueError as error:
        raise BenchError(f"--request {options.request!r} is not JSON: {error}") from None
    if not isinstance(more, dict):
        raise BenchError(f"--request {options.request!r} is no JSON object")
    return Plan(
        model=options.model,
        task=task,
        task_from=said_by,
        shapes=shapes,
        bodies=[
            body(shape, task, prompt=options.prompt, seed=options.seed, steps=options.steps, more=more)
            for shape in shapes
        ],
        requests=options.requests,
        rounds=options.rounds,
        together=options.together,
        offline=options.offline,
        arguments=options.arguments,
        seed=options.seed,
        budget_s=options.budget,
        ready_timeout_s=options.ready_timeout,
    )


def _task(options: argparse.Namespace, shapes: Sequence[Shape]) -> tuple[Literal["image", "video"], str]:
    """Find what a model makes, and who says so."""
    if options.task is not None:
        return options.task, "--task says so"
    if any(shape.frames is not None for shape in shapes):
        return "video", "--shape has frames"
    try:
        asked = subprocess.run(
            [sys.executable, "-m", _DETECT, options.model],
            capture_output=True,
            text=True,
            timeout=_DETECT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise BenchError(
            f"vLLM-Omni did not say within {_DETECT_S:.0f} s what {options.model} makes; give --task"
        ) from None
    lines = asked.stdout.splitlines()
    try:
        found = json.loads(lines[-1]) if lines else {}
    except ValueError:
        found = {}
    made = found.get("makes")
    if made in ("image", "video"):
        return made, f"vLLM-Omni says so of {found['pipeline']}"
    what = f"makes {made}" if made else "is no diffusion model that vLLM-Omni knows"
    said = asked.stderr.strip().splitlines()[-1:] if asked.returncode else []
    raise BenchError(
        f"{options.model} {what}; the bench asks for images or videos: give --task image or --task video"
        + "".join(f" (vLLM-Omni said: {line})" for line in said)
    )


def _show(measured: Result) -> None:
    from rich.console import Console

    from vllm_omni_diffusion_compile.bench.recommend import recommend
    from vllm_omni_diffusion_compile.bench.table import table

    output = Console(highlight=False)
    if not output.is_terminal:
        output = Console(highlight=False, width=160, no_color=True)
    output.print(table(measured))
    for entry in measured.arms:
        if entry.not_measured:
            some = " completely" if any(start.samples for start in measured.starts_of(entry.name)) else ""
            output.print(f"{entry.name} was not measured{some}: {entry.not_measured}", markup=False, soft_wrap=True)
            for line in _log_tail(measured, entry.name):
                output.print(f"  {line}", markup=False, soft_wrap=True)
    advice = recommend(measured)
    for sentence in advice.sentences:
        output.print(sentence, markup=False, soft_wrap=True)
    if advice.command is not None:
        output.print(f"\n{advice.command}", markup=False, soft_wrap=True)


def _log_tail(measured: Result, arm: str) -> Iterator[str]:
    """Yield the end of the log of a server that failed, as far as it fits on a screen; the JSON has more."""
    tails = [start.log_tail for start in measured.starts_of(arm) if start.log_tail]
    yield from (tails[-1].splitlines()[-8:] if tails else ())
