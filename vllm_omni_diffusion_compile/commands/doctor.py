"""`vllm-omni-compile doctor`: whether a server will work here, and what to do if not, before one is started."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_omni_diffusion_compile import __version__
from vllm_omni_diffusion_compile.commands.output import console
from vllm_omni_diffusion_compile.doctor.finding import Finding, State, exit_status
from vllm_omni_diffusion_compile.errors import SettingError

if TYPE_CHECKING:
    from vllm_omni_diffusion_compile.upstream.inspection.settings import Resolution

HELP = "say whether a server will work on this machine, and what to do if not; nothing is started"

_DOCUMENT_VERSION = 1
_VERDICTS = ("nothing was found against it", "it will work, with a limit", "it will not work")
# As many names as a reader takes in; of more, there is the number.
_LISTED = 16
_STYLES: dict[State, str] = {"ok": "green", "unknown": "cyan", "limit": "yellow", "broken": "bold red"}
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # what is not on this machine is not fetched
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TQDM_DISABLE": "1",
}

Doing = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Section:
    """Findings that belong together.

    Args:
        title: What they are about.
        findings: In the order in which they were looked for.
    """

    title: str
    findings: tuple[Finding, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("--json", action="store_true", help="print a document for machines")
    parser.add_argument("--all", action="store_true", help="list one by one what is counted otherwise")
    parser.add_argument(
        "--config", metavar="FILE.yaml", help="a deploy YAML to check, as in vllm serve --deploy-config"
    )
    parser.add_argument(
        "line",
        nargs="*",
        metavar="-- vllm serve MODEL --omni ...",
        help="a command line to check, as it would be typed",
    )


def run(options: argparse.Namespace) -> int:
    """Check everything and print what was found; return 0, 1 (works with a limit) or 2 (will not work).

    Raises:
        SettingError: What follows `--` is no `vllm serve` command line.
    """
    words = _serve_words(options.line, options.config)
    # Importing the host prints to wherever it likes; stdout is for what was found.
    with _environment(), contextlib.redirect_stdout(sys.stderr), _progress() as doing:
        sections = list(examine(words, options.config, doing))
    status = exit_status(finding for section in sections for finding in section.findings)
    if options.json:
        print(json.dumps(document(sections, status), indent=1, default=str))
    else:
        _print(sections, status, everything=options.all)
    return status


def examine(words: list[str] | None, config: str | None, doing: Doing = lambda _: None) -> Iterator[Section]:
    """Look at everything, and yield what was found section by section.

    Args:
        words: A command line from `serve` on, or None.
        config: The path of a deploy YAML, or None.
        doing: Told what comes next.
    """
    from vllm_omni_diffusion_compile.doctor.versions import check_versions, is_there
    from vllm_omni_diffusion_compile.upstream.releases import TESTED_RELEASES

    doing("reading what is installed")
    yield _section("versions", check_versions(TESTED_RELEASES))
    resolution: Resolution | None = None
    if all(map(is_there, ("torch", "vllm", "vllm_omni"))):
        resolution = yield from _examine_host(words, config, doing)
    elif words or config:
        yield _section("settings", [Finding.unknown("command line", "not resolved: that takes vLLM and vLLM-Omni")])
    configs = [settings.diffusion_compile_config for settings in (resolution.settings if resolution else ())]
    doing("compiling a line of C++")
    from vllm_omni_diffusion_compile.doctor.toolchain import check_toolchain

    if resolution is not None and resolution.compiles_nothing:
        yield _section("compiler", [Finding.ok("compiler", "not needed: nothing is compiled (enforce_eager)")])
    else:
        yield _section("compiler", check_toolchain(fails_closed=any(each.on_failure == "raise" for each in configs)))
    if is_there("torch"):
        from vllm_omni_diffusion_compile.doctor.cache import check_cache

        directories = dict.fromkeys(each.cache_dir for each in configs) or {None: None}
        yield _section("compile cache", (found for each in directories for found in check_cache(each)))


def _examine_host(
    words: list[str] | None, config: str | None, doing: Doing
) -> Generator[Section, None, Resolution | None]:
    """Look at what takes vLLM-Omni; return what the command line comes to."""
    import torch

    from vllm_omni_diffusion_compile.errors import GraftError
    from vllm_omni_diffusion_compile.upstream.inspection import grafts, plugins

    yield _section("plugins", plugins.check_plugins(accelerator=torch.accelerator.is_available()))
    doing("importing vLLM-Omni, which takes a while")
    try:
        grafts.load_host()
    except GraftError:
        pass  # each that does not hold is named below
    except Exception as error:  # noqa: BLE001 - a damaged installation may raise anything, and that is what is reported
        yield _section("grafts", [_unimportable(error)])
        return None
    if not plugins.is_loaded():
        yield _section("grafts", [Finding.unknown("grafts", "none is applied, since the plugin is not loaded")])
        return None
    doing("checking every graft")
    checked = _section("grafts", grafts.check_grafts())
    yield checked
    if exit_status(checked.findings) == 2:
        if words or config:
            unresolved = Finding.unknown("command line", "not resolved: no server starts with a graft refused")
            yield _section("settings", [unresolved])
        return None
    return (yield from _examine_stages(words, config, doing))


def _examine_stages(words: list[str] | None, config: str | None, doing: Doing) -> Generator[Section, None, Resolution]:
    """Look at the settings, and at what they choose on this platform."""
    from vllm_omni_diffusion_compile.doctor.files import check_files
    from vllm_omni_diffusion_compile.doctor.rainfusion import check_rainfusion
    from vllm_omni_diffusion_compile.upstream.inspection import attention, pipelines, settings

    resolution = settings.Resolution(findings=())
    if words or config:
        doing("resolving the command line")
        resolution = settings.resolve_line(words) if words else settings.resolve_yaml(str(config))
        compilers = pipelines.check_compilers(resolution.settings)
        named = dict.fromkeys(
            (setting.warmup.report_path, setting.require_evidence)
            for setting in (each.diffusion_compile_config for each in resolution.settings)
        )
        files = [found for report, rows in named for found in check_files(report_path=report, require_evidence=rows)]
        yield _section("settings", [*resolution.findings, *compilers, *files])
        yield _section("components", pipelines.check_pipelines(resolution.stages))
    doing("asking the platform for attention backends")
    configs = [each.diffusion_compile_config for each in resolution.settings]
    needs_inductor = not configs or any(each.needs_inductor for each in configs)
    yield _section("platform", attention.check_platform(needs_inductor=needs_inductor))
    selected = pipelines.selected_backends(resolution.stages)
    device, sparse = attention.device_type(), "RAINFUSION_ATTN" in selected
    executors = dict.fromkeys(each.rainfusion_executor for each in configs) or {"auto": None}
    rainfusion = (
        found for executor in executors for found in check_rainfusion(device, executor=executor, selected=sparse)
    )
    yield _section("attention", [*attention.check_backends(selected), *dict.fromkeys(rainfusion)])
    return resolution


def document(sections: Iterable[Section], status: int) -> dict[str, Any]:
    """Return what was found as plain data; its form is documented in docs/doctor.md."""
    return {
        "version": _DOCUMENT_VERSION,
        "package": __version__,
        "exit_status": status,
        "verdict": _VERDICTS[status],
        "sections": [
            {"title": section.title, "findings": [asdict(finding) for finding in section.findings]}
            for section in sections
        ],
    }


def _serve_words(line: list[str], config: str | None) -> list[str] | None:
    """Return a command line from `serve` on, with the deploy YAML in it."""
    if config is not None and not Path(config).is_file():
        raise SettingError(f"--config is {config!r}, and there is no such file; expected a deploy YAML")
    if not line:
        return None
    program, *rest = line
    if Path(program).name != "vllm" or rest[:1] != ["serve"]:
        raise SettingError(f"found {' '.join(line[:2])!r} behind --, expected: -- vllm serve MODEL --omni ...")
    return [*rest, *(() if config is None else ("--deploy-config", config))]


def _section(title: str, findings: Iterable[Finding]) -> Section:
    return Section(title=title, findings=tuple(findings))


def _unimportable(error: BaseException) -> Finding:
    return Finding.broken(
        "vLLM-Omni",
        f"importing it fails ({type(error).__name__}: {error})",
        "install vLLM, vLLM-Omni and torch again, in builds that belong together",
    )


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Set what keeps the host quiet and off the network, where the user has not."""
    ours = {name: value for name, value in _ENVIRONMENT.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


@contextlib.contextmanager
def _progress() -> Iterator[Doing]:
    """Say on a terminal what is being done."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield lambda what: status.update(f"doctor: {what} ...")


def _print(sections: Iterable[Section], status: int, *, everything: bool) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table("state", "what", "found", box=box.SIMPLE_HEAD, show_edge=False)
    table.columns[1].overflow = table.columns[2].overflow = "fold"
    for section in sections:
        if not section.findings:
            continue
        table.add_section()
        table.add_row("", Text(section.title, style="bold"), "")
        for finding in section.findings if everything else _folded(section):
            found = Text(finding.found)
            if finding.remedy:
                found.append(f"\n→ {finding.remedy}", style="italic")
            table.add_row(Text(finding.state, style=_STYLES[finding.state]), Text(finding.name), found)
    output = console()
    output.print(table)
    output.print(f"\n{_VERDICTS[status]} (exit status {status})", style="bold", highlight=False)


def _folded(section: Section) -> Iterator[Finding]:
    """Yield what stands by itself, then what is counted."""
    groups: dict[str, list[str]] = {}
    for finding in section.findings:
        if finding.state == "ok" and finding.group:
            groups.setdefault(finding.group, []).append(_short(finding.name))
        else:
            yield finding
    for group, names in groups.items():
        listed = f": {', '.join(names)}" if len(names) <= _LISTED else ""
        yield Finding.ok(f"{len(names)} alike", f"{group}{listed}")


def _short(name: str) -> str:
    """The end of a name that still says what it is: of a graft, what its module has; of a setting, its key."""
    _, colon, attribute = name.partition(":")
    return attribute if colon else name.rpartition(".")[2]
