"""Which grafts the supported releases of vLLM-Omni still need.

    python -m tools.grafts                                  # of this interpreter's environment
    python -m tools.grafts .venvs/*/bin/python              # of several, one column each
    python -m tools.grafts .venvs/*/bin/python NEWER/bin/python

In each environment every module that the ledgers name is imported as the release has it, with none of our plugins, and
each row is asked what its own probes say: whether the release has the capability itself, has the target at all, and is
what the row was written for. A row that no supported release needs can go; the status is 1 then, and where a row does
not fit a release that it is for. A release outside of TESTED_RELEASES counts for neither: it only says what will come.

Most rows have no probe of their own, since what they cure is behaviour. For them the code of the target is compared
with that of the newest supported release: where a newer one has changed it, `remove_when` is worth reading again.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import inspect
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
State = Literal["needed", "native", "not for it", "gone", "does not fit"]
_MARK = "GRAFTS "


@dataclass(frozen=True)
class Finding:
    """What one release says of one row.

    Args:
        row: Its place in the ledgers, which tells rows on the same target apart.
        name: What it changes.
        state: `needed`; `native`: the release has it itself; `not for it`: the row is for other releases; `gone`: the
            module cannot be imported; `does not fit`: it is not what the row was written for.
        detail: Why, for the last two.
        code: Digest of the target's code; None where it has none.
    """

    row: int
    name: str
    state: State
    detail: str = ""
    code: str | None = None


@dataclass(frozen=True)
class Release:
    """What is installed in one environment, and what it says of every row."""

    version: str
    supported: bool
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Verdict:
    """What becomes of a row.

    Args:
        removable: No supported release needs it.
        broken: A supported release that it is for is not what it was written for.
        text: In words.
    """

    removable: bool
    broken: bool
    text: str


def probe() -> Release:
    """Ask the release of this process's environment. Nothing of ours may be grafted in it."""
    from tools.pre_commit.ledgers import all_rows, qualified_name
    from vllm_omni_diffusion_compile.upstream.graft import applied, installed_release
    from vllm_omni_diffusion_compile.upstream.releases import TESTED_RELEASES

    rows = all_rows()
    findings = []
    for number, row in enumerate(rows):
        assert not applied(row), f"{row.target} is grafted; run this with VLLM_PLUGINS without our plugins"
        findings.append(_ask(number, qualified_name(row), row))
    version = installed_release("vllm-omni") or "0"
    return Release(version, SpecifierSet(TESTED_RELEASES, prereleases=True).contains(version), tuple(findings))


def _ask(number: int, name: str, row: Any) -> Finding:
    from vllm_omni_diffusion_compile.errors import GraftError
    from vllm_omni_diffusion_compile.upstream.graft import _in_release

    if not _in_release(row):
        return Finding(number, name, "not for it")
    try:
        module = importlib.import_module(row.module)
    except Exception as error:  # noqa: BLE001 - whatever a module of another release raises is its finding
        return Finding(number, name, "gone", f"{type(error).__name__}: {error}".partition("\n")[0])
    try:
        # With nothing of ours applied, what is `present` is the release's own.
        if row.steps_aside(module) or (row.present is not None and row.present(module)):
            return Finding(number, name, "native")
        row.check(module)
    except GraftError as error:
        return Finding(number, name, "does not fit", f"expected {error.expected}, found {error.found}")
    return Finding(number, name, "needed", code=_code(row, module))


def _code(row: Any, module: Any) -> str | None:
    """Return a digest of the target's source, whatever its indentation and its place in the file."""
    owner, attribute = row.locate(module)
    try:
        source = inspect.getsource(inspect.unwrap(getattr(owner, attribute)))
    except (TypeError, OSError, AttributeError):
        return None
    return hashlib.sha256(textwrap.dedent(source).encode()).hexdigest()


def verdict(findings: Mapping[str, Finding], supported: Sequence[str]) -> Verdict:
    """Judge one row.

    Args:
        findings: By release, the oldest first.
        supported: The releases that this package supports, of those asked; there is one at least.
    """
    unfit = {release: found for release, found in findings.items() if found.state in ("gone", "does not fit")}
    if broken := [release for release in supported if release in unfit]:
        return Verdict(False, True, f"does not fit {broken[0]}: {unfit[broken[0]].detail}")
    states = [findings[release].state for release in supported]
    if "needed" not in states:
        if "native" in states:
            return Verdict(True, False, "can be removed: all supported releases that it is for have it")
        return Verdict(True, False, "can be removed: it is for no supported release")
    if unfit:
        release = next(iter(unfit))
        return Verdict(False, False, f"needed; will not fit {release}: {unfit[release].detail}")
    if (since := _native_since(findings)) is not None:
        return Verdict(False, False, f"needed by older releases; native since {since}")
    if (ends := _last_needed(findings)) is not None:
        return Verdict(False, False, f"needed until {ends} is no longer supported")
    *_, newest = findings
    if newest not in supported and findings[newest].code != findings[supported[-1]].code:
        return Verdict(
            False, False, f"needed; its code in {newest} is not that of {supported[-1]}: read its remove_when"
        )
    return Verdict(False, False, "needed")


def _native_since(findings: Mapping[str, Finding]) -> str | None:
    """Return the release from which on all have it."""
    since = None
    for release, found in reversed(list(findings.items())):
        if found.state != "native":
            break
        since = release
    return since


def _last_needed(findings: Mapping[str, Finding]) -> str | None:
    """Return the last release that needs a row, where newer ones are not what it is for."""
    *_, newest = findings
    needed = [release for release, found in findings.items() if found.state == "needed"]
    return needed[-1] if findings[newest].state == "not for it" and needed else None


def ask(python: Path) -> Release:
    """Probe the environment of an interpreter, in a process of its own."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "VLLM_PLUGINS": "",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(
        [str(python), "-m", "tools.grafts", "--probe"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    line = next((line for line in done.stdout.splitlines() if line.startswith(_MARK)), None)
    if done.returncode != 0 or line is None:
        raise SystemExit(f"{python}: expected an environment with vLLM-Omni, found:\n{done.stdout}{done.stderr}")
    said = json.loads(line.removeprefix(_MARK))
    return Release(said["version"], said["supported"], tuple(Finding(**found) for found in said["findings"]))


def judge(releases: Sequence[Release]) -> list[tuple[str, Verdict]]:
    """Return name and verdict of every row, in the order of the ledgers."""
    ordered = sorted(releases, key=lambda release: Version(release.version))
    supported = [release.version for release in ordered if release.supported]
    if not supported:
        raise SystemExit(f"found {', '.join(release.version for release in ordered)}, none of which is supported")
    judged = []
    for number, first in enumerate(ordered[0].findings):
        by_release = {release.version: release.findings[number] for release in ordered}
        judged.append((first.name, verdict(by_release, supported)))
    return judged


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what becomes of each row; return 1 if one can go or does not fit."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("python", nargs="*", type=Path, default=[Path(sys.executable)], help="of each environment")
    parser.add_argument("--probe", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.probe:
        print(f"{_MARK}{json.dumps(asdict(probe()))}", flush=True)
        return 0
    # As absolute as they are given: a venv's interpreter is a link whose place says which venv it is.
    with ThreadPoolExecutor(2) as pool:
        releases = list(pool.map(ask, (Path.cwd() / python for python in options.python)))
    judged = judge(releases)
    asked = ", ".join(
        f"{release.version}{'' if release.supported else ' (not supported)'}"
        for release in sorted(releases, key=lambda release: Version(release.version))
    )
    table = Table("graft", "what becomes of it", title=f"Grafts on vLLM-Omni {asked}", title_justify="left")
    for name, found in judged:
        table.add_row(name, found.text)
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    removable = sum(found.removable for _, found in judged)
    broken = sum(found.broken for _, found in judged)
    print(f"{len(judged)} rows, {removable} of which can be removed; {broken} do not fit a supported release.")
    return 1 if removable or broken else 0


if __name__ == "__main__":
    sys.exit(main())
