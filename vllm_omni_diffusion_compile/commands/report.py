"""`vllm-omni-compile report`: what a server was warm for when it was ready, and what it met since."""

from __future__ import annotations

import argparse
import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from vllm_omni_diffusion_compile.commands.output import console
from vllm_omni_diffusion_compile.errors import ReportError

_TIMEOUT_S = 30.0
# vLLM's own variable for the key of its server.
_API_KEY = "VLLM_API_KEY"
_REPORT_PATH = "diffusion_compile_config.warmup.report_path"


HELP = "print what a server was warm for when it was ready, and what it met since"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument(
        "source",
        metavar="FILE-or-URL",
        help="the file of warmup.report_path, the URL of such a file, or the address of a server (http://HOST:PORT)",
    )
    parser.add_argument("--json", action="store_true", help="print the document instead of tables")


def run(options: argparse.Namespace) -> int:
    """Print a report."""
    report = read(options.source)
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        _print(report)
    return 0


def read(source: str) -> dict[str, Any]:
    """Read a report from a file, from a URL, or from a server.

    Raises:
        ReportError: There is none.
    """
    text = _fetched(source) if source.startswith(("http://", "https://")) else _file(source)
    try:
        report = json.loads(text)
    except ValueError as error:
        raise ReportError(f"{source} is not JSON ({error}), expected a report that a server wrote") from None
    if not isinstance(report, dict) or not isinstance(report.get("shapes"), list) or "version" not in report:
        raise ReportError(f"{source} is JSON, but no report; expected the file that {_REPORT_PATH} names")
    return report


def _file(path: str) -> str:
    try:
        return Path(path).expanduser().read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"{path} cannot be read ({error}); expected the file that {_REPORT_PATH} names") from None


def _fetched(url: str) -> str:
    from vllm_omni_diffusion_compile.warmup.report import ROUTE

    if urlsplit(url).path in ("", "/"):
        url = url.rstrip("/") + ROUTE
    key = os.environ.get(_API_KEY)
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        raise ReportError(f"{url} answered {error.code}: {_message(error.read())}") from None
    except (urllib.error.URLError, OSError, UnicodeDecodeError) as error:
        raise ReportError(f"{url} cannot be read ({getattr(error, 'reason', error)}); is the server ready?") from None


def _message(body: bytes) -> str:
    """Take the message out of an answer in OpenAI's form, or in FastAPI's."""
    try:
        answer = json.loads(body)
        return str(answer["error"]["message"] if "error" in answer else answer["detail"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace") or "nothing"


def _print(report: Mapping[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    from vllm_omni_diffusion_compile.warmup.report import HEADINGS, as_yaml, eager_line, rows

    output = console()
    budget = f" of {report['budget_s']:g} s" if report.get("budget_s") else ""
    # Of names and reasons nothing is markup.
    title = f"{report.get('model', '')}: declared shapes, warm in {report['spent_s']:.1f} s{budget}"
    table = Table(title=Text(title, style="table.title"))
    for column, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if 2 <= column <= 6 else "left", overflow="fold")
    for row in rows(report):
        table.add_row(*map(Text, row))
    output.print(table if report["shapes"] else "No shapes are declared.")
    if said := eager_line(report):
        output.print(said, markup=False, highlight=False, soft_wrap=True)
    _print_timings(output, report)
    undeclared = report.get("undeclared", [])
    if not undeclared:
        output.print("No request has waited for the compiler since the server was ready.")
        return
    output.print("Requests waited for the compiler since; to declare them, under warmup.shapes:", soft_wrap=True)
    for entry in undeclared:
        what = f"{entry['compile_events']} compile event(s), {entry['compile_s']:.1f} s: {', '.join(entry['regions'])}"
        output.print(f"  {as_yaml(entry['shape'])}  # {what}", markup=False, highlight=False, soft_wrap=True)
    if left_out := report.get("undeclared_left_out"):
        output.print(f"  and {left_out} compile event(s) of further shapes")


def _print_timings(output: Any, report: Mapping[str, Any]) -> None:
    """Say where the seconds of each shape's first and last request went."""
    from rich.table import Table
    from rich.text import Text

    parts = ("preparation_s", "compile_s", "execution_s", "transport_s")
    table = Table(title="Seconds of its first and its last request")
    table.add_column("Shape", overflow="fold")
    table.add_column("Request")
    for heading in ("Preparation", "Compiling", "Execution", "Output transport"):
        table.add_column(heading, justify="right")
    table.add_column("Stages, as the host names them", overflow="fold")
    for shape in report["shapes"]:
        for name in ("cold", "warm"):
            timing = shape[name]
            if timing:
                cells = ("" if timing[part] is None else f"{timing[part]:.3f}" for part in parts)
                stages = ", ".join(f"{stage} {seconds:.3f}" for stage, seconds in timing["stages"].items())
                table.add_row(Text(shape["name"]), name, *cells, Text(stages))
    if table.row_count:
        output.print(table)
