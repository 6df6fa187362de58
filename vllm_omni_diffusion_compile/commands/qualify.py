"""`vllm-omni-compile qualify`: run declared combinations on this machine against the eager model, and write rows."""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_omni_diffusion_compile.errors import EvidenceError

if TYPE_CHECKING:
    from typing_extensions import Self

    from vllm_omni_diffusion_compile.commands.qualify_run import Run
    from vllm_omni_diffusion_compile.evidence import Row
    from vllm_omni_diffusion_compile.evidence.suite import Declared, Suite

HELP = "run combinations of model and settings against the eager model, and write a row of evidence for each"

_SHOWN_REASON = 200
_INTERRUPTED = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--suite", metavar="NAME-or-FILE", help="the list of combinations: tiny, or a YAML file")
    what.add_argument("--model", metavar="MODEL", help="one combination of this checkpoint, from the options below")
    what.add_argument("--row", metavar="FILE#ID", help="run the combination of a row again, and compare with it")
    parser.add_argument(
        "--only", metavar="ID", action="append", default=[], help="of the suite, this combination; may be repeated"
    )
    parser.add_argument(
        "--out", metavar="DIR", type=Path, default=Path("qualify"),
        help="folder of the raw artefacts and the log of each process (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--evidence", metavar="FILE", type=Path,
        help="JSON lines to write the rows to, where those of the same id are replaced (default: rows.jsonl in --out)",
    )  # fmt: skip
    one = parser.add_argument_group("with --model")
    one.add_argument("--id", metavar="ID", default="combination", help="of its row (default: %(default)s)")
    one.add_argument("--task", metavar="TASK", default="text-to-image", help="of its key (default: %(default)s)")
    one.add_argument(
        "--api", choices=("offline", "http"), default="offline",
        help="ask Omni in a program, or the server (default: %(default)s)",
    )  # fmt: skip
    one.add_argument("--settings", metavar="JSON", default="{}", help="keyword arguments of Omni")
    one.add_argument("--request", metavar="JSON", default="{}", help="prompt, seed, width, height and so on")
    parser.add_argument(
        "--reuse-oracles", action="store_true",
        help="take oracles that an earlier run left in --out, with the same software on such a machine",
    )  # fmt: skip
    parser.add_argument(
        "--jobs", metavar="N", type=int, default=1,
        help="combinations at once, each a process with a model of its own; on an accelerator they share the device "
        "and its memory (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--timeout", metavar="S", type=float, help="seconds that one process may take")
    parser.add_argument("--json", action="store_true", help="print the rows instead of a table")


def run(options: argparse.Namespace) -> int:
    """Run the combinations; the status is 1 if one failed, and 128 and more for a signal."""
    from vllm_omni_diffusion_compile.bench import interrupts
    from vllm_omni_diffusion_compile.commands.qualify_process import Processes
    from vllm_omni_diffusion_compile.commands.qualify_run import Run, device_count

    if options.row is not None and (options.only or options.evidence is not None):
        raise EvidenceError("--only and --evidence go with --suite; a row that is run again is not written")
    if options.jobs < 1:
        raise EvidenceError(f"--jobs is {options.jobs}, expected at least 1")
    combinations, timeout_s = _declared(options)
    evidence = options.evidence or options.out / "rows.jsonl"

    def command(name: str) -> str:
        # A row that is run again came from somewhere; what is new is found where it is written.
        file = evidence.name if evidence.is_absolute() else evidence.as_posix()
        return f"vllm-omni-compile qualify --row {options.row or f'{file}#{name}'}"

    write_to = evidence if options.row is None else None
    processes = Processes()
    try:
        with interrupts.raised(), _Progress(len(combinations)) as progress:
            running = Run(
                out=options.out, timeout_s=timeout_s, devices=device_count(), command=command, processes=processes,
                started=progress.started, ended=progress.ended, reuse_oracles=options.reuse_oracles,
            )  # fmt: skip
            rows = _rows(running, combinations, options.jobs, write_to, progress.advance)
    except interrupts.Interrupted as interrupt:
        done = "" if write_to is None else f"; rows of what was done are in {evidence}, if there are any"
        left = f"still there after SIGKILL: {', '.join(processes.left)}" if processes.left else "no process is left"
        print(f"stopped by {interrupt}; {left}{done}", file=sys.stderr)
        return _INTERRUPTED + interrupt.number
    if options.json:
        print(json.dumps([row.model_dump(mode="json") for row in rows], indent=1))
    else:
        _print(rows)
    if options.row is not None:
        return _compare_with(options.row, rows[0])
    print(f"rows: {evidence}; raw artefacts and logs: {options.out}", file=sys.stderr)
    return int(any(row.state == "failed" for row in rows))


def _rows(
    running: Run, combinations: Sequence[Declared], jobs: int, evidence: Path | None, done: Callable[[], object]
) -> list[Row]:
    """Run combinations, several at once, and write each row as it is done; an interrupt ends every process."""
    from vllm_omni_diffusion_compile.bench.interrupts import deferred
    from vllm_omni_diffusion_compile.evidence import write_rows

    rows: dict[int, Row] = {}
    # Threads, also of one job: signals come to the main thread only, so that none hits where a process starts.
    pool = ThreadPoolExecutor(jobs)
    try:
        order = list(range(len(combinations)))
        if jobs > 1:
            order.sort(key=lambda number: -combinations[number].takes_s)
        numbers = {pool.submit(running.row, combinations[number]): number for number in order}
        for future in as_completed(numbers):
            rows[numbers[future]] = future.result()
            if evidence is not None:  # what was measured outlives an interrupt
                write_rows(evidence, [rows[number] for number in sorted(rows)])
            done()
    finally:
        with deferred():
            running.processes.stop()
            pool.shutdown(cancel_futures=True)
    return [rows[number] for number in sorted(rows)]


def _declared(options: argparse.Namespace) -> tuple[Sequence[Declared], float]:
    from vllm_omni_diffusion_compile.evidence import row_named
    from vllm_omni_diffusion_compile.evidence.suite import Suite, again, read_suite

    if options.row is not None:
        return [again(row_named(options.row))], options.timeout or Suite.model_fields["timeout_s"].default
    suite = read_suite(options.suite) if options.suite is not None else _one(options)
    known = [combination.id for combination in suite.combinations]
    for name in options.only:
        if name not in known:
            raise EvidenceError(f"--only {name}: {options.suite} has no such combination; it has {', '.join(known)}")
    chosen = [combination for combination in suite.combinations if not options.only or combination.id in options.only]
    return [suite.declared(combination) for combination in chosen], options.timeout or suite.timeout_s


def _one(options: argparse.Namespace) -> Suite:
    """Make a suite of the one combination that the command line describes."""
    from pydantic import ValidationError

    from vllm_omni_diffusion_compile.evidence.row import explain
    from vllm_omni_diffusion_compile.evidence.suite import Suite

    try:
        settings, request = json.loads(options.settings), json.loads(options.request)
    except ValueError as error:
        raise EvidenceError(f"--settings and --request take JSON ({error})") from None
    model = {"checkpoint": options.model, "task": options.task, "settings": settings, "request": request}
    try:
        return Suite.model_validate(
            {
                "models": {"model": model},
                "combinations": [{"id": options.id, "model": "model", "api": options.api}],
            }
        )
    except ValidationError as error:
        raise EvidenceError(explain(error)) from None


class _Progress:
    """A bar, or lines where nobody looks; told by several threads."""

    def __init__(self, total: int) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=total, unit="combination", disable=None, file=sys.stderr)
        self._running: list[str] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def started(self, name: str) -> None:
        with self._lock:
            self._running.append(name)
            self._bar.set_postfix_str(", ".join(self._running))
            if self._bar.disable:
                print(f"running {', '.join(self._running)}", file=sys.stderr, flush=True)

    def ended(self, name: str) -> None:
        with self._lock:
            self._running.remove(name)
            self._bar.set_postfix_str(", ".join(self._running))

    def advance(self) -> None:
        self._bar.update()


def _print(rows: Sequence[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{', '.join(f'{count} {state}' for state, count in Counter(r.state for r in rows).items())}")
    for heading in ("Row", "State", "Nearest to its bound", "Attention that ran"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        operators = ", ".join(f"{name} {count}" for name, count in row.trace.operators.items()) if row.trace else ""
        table.add_row(row.id, row.state, (row.reason or nearest(row))[:_SHOWN_REASON], operators)
    Console().print(table)


def nearest(row: Row) -> str:
    """Name the figure that is nearest to its bound."""
    if not row.figures:
        return ""
    item = max(row.figures, key=lambda item: item.value / item.bound if item.bound else item.value)
    return f"{item.name}: {item.value:.3g} of {item.bound:g}"


def _compare_with(reference: str, found: Row) -> int:
    """Say whether a row that was run again came out as it stands in its file."""
    from vllm_omni_diffusion_compile.evidence import row_named

    known = row_named(reference)
    differs = [
        f"{name}: {getattr(found.key, name)!r}, and {getattr(known.key, name)!r} in the row"
        for name in type(known.key).model_fields
        if getattr(found.key, name) != getattr(known.key, name)
    ]
    if known.provenance and found.provenance:
        differs += [
            f"{name}: {getattr(found.provenance, name)!r}, and {getattr(known.provenance, name)!r} in the row"
            for name in ("checkpoint_revision", "vllm_omni", "version", "torch")
            if getattr(found.provenance, name) != getattr(known.provenance, name)
        ]
    before = {(item.seen, item.name): item.value for item in known.figures}
    changed = [
        f"{item.name}: {item.value:g}, was {before.get((item.seen, item.name))}"
        for item in found.figures
        if item.value != before.get((item.seen, item.name))
    ]
    print(f"{known.id}: {found.state}, and {known.state} in the row")
    for line in differs:
        print(f"  other than in the row: {line}")
    print("  figures: " + ("the same to the last digit" if not changed else "; ".join(changed)))
    return int(found.state != known.state)
