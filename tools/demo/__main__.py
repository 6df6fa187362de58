"""`python -m tools.demo [--all] [FLAGS of vllm serve, for the server with this package]`."""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
from rich.console import Console
from rich.text import Text

from tools.demo import verdict
from tools.demo.arms import FURTHER_REQUESTS, SIZES, Arm, Measured, arms
from tools.demo.pictures import STEPS, request
from tools.demo.progress import Activity
from tools.demo.server import Server, ServerError, log_lines
from tools.demo.table import console, table
from tools.demo.trace import TraceError, count
from tools.tiny_checkpoints import checkpoint, klein
from vllm_omni_diffusion_compile.bench import interrupts

OUTPUT = Path("demo-output")
_TAIL_LINES = 40
# vllm_omni/diffusion/compile.py, `regionally_compile`, and our upstream/transformer.py.
_REGIONS = re.compile(r"(?:Regional compilation applied to|torch\.compile with dynamic=\w+;) (\d+) module\(s\)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; the exit status is not zero if anything failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.demo",
        allow_abbrev=False,
        description="Serves a tiny diffusion model with and without this package and prints what differs.",
        epilog="Every other flag goes to `vllm serve` of the server with this package.",
    )
    parser.add_argument("--all", action="store_true", help="compare with dynamic shapes, the default, as well")
    options, flags = parser.parse_known_args(arguments)
    output = console()
    try:
        with interrupts.raised():
            return _run(output, flags, everything=options.all)
    except interrupts.Interrupted as interrupt:
        output.print(f"stopped by {interrupt}; no process is left")
        return 128 + interrupt.number


def _run(output: Console, flags: Sequence[str], *, everything: bool) -> int:
    started = time.monotonic()
    OUTPUT.mkdir(exist_ok=True)
    for file in (*OUTPUT.glob("*.log"), *OUTPUT.glob("*.png")):
        file.unlink()  # of an earlier run: what lies there afterwards is of this one
    model = checkpoint.run("klein", klein.VERSION, klein.write, [])
    measured: list[Measured] = []
    for arm in arms(flags, everything=everything):
        log = OUTPUT / f"{arm.name}.log"
        try:
            measured.append(_measure(output, arm, model, log))
        except (ServerError, TraceError) as error:
            if log.exists():
                tail = "\n".join(log_lines(log)[-_TAIL_LINES:])
                output.print(Text(f"--- the last {_TAIL_LINES} lines of {log} ---\n{tail}\n---"), soft_wrap=True)
            output.print(Text(f"{arm.title}: {error}\nThe whole log: {log}", style="red"))
            return 1
    output.print(table(measured, plain=not output.is_terminal))
    for ours, stock in zip(measured[::2], measured[1::2], strict=True):
        for sentence in verdict.sentences(ours, stock):
            output.print(Text(sentence), soft_wrap=not output.is_terminal)
    output.print(Text(f"Pictures and logs are in {OUTPUT}/. The demo took {time.monotonic() - started:.0f} s."))
    found = [problem for arm in measured for problem in verdict.problems(arm)]
    for problem in found:
        output.print(Text(problem, style="red"))
    return 1 if found else 0


def _measure(output: Console, arm: Arm, model: Path, log: Path) -> Measured:
    pictures = {size: OUTPUT / f"{arm.name}-{size}.png" for size in SIZES}
    server = Server(_from_here(model), arm.flags, plugins=arm.plugins, log=log)
    output.print(Text(f"\n{arm.title}: {server.command}"), soft_wrap=True)
    with server:
        with Activity(output, arm.title) as activity:
            ready_s = server.wait_ready(activity.show)
            output.print(f"  ready after {ready_s:.1f} s")
            first_s, median_s = {}, {}
            with httpx.Client(base_url=server.url) as client:
                for size in SIZES:
                    activity.show(f"requesting {size} with {STEPS} denoise steps")
                    first_s[size] = request(client, size, pictures[size])
                    further = [request(client, size) for _ in range(FURTHER_REQUESTS)]
                    median_s[size] = statistics.median(further)
                    times = ", ".join(f"{seconds:.2f}" for seconds in further)
                    output.print(f"  {size}: first {first_s[size]:.2f} s, then {times} s")
        compiled = count(server.traces, server.ready)
        regions = server.total_in_log(_REGIONS)
    return Measured(
        arm=arm,
        ready_s=ready_s,
        first_s=first_s,
        median_s=median_s,
        compiled=compiled,
        regions=regions,
        pictures=pictures,
    )


def _from_here(path: Path) -> Path:
    """Return the path as a user would type it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


if __name__ == "__main__":
    sys.exit(main())
