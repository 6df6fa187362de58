"""`vllm-omni-compile report`: a file, a URL or a server; what is neither is one line and exit 2."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from vllm_omni_diffusion_compile.commands.main import main
from vllm_omni_diffusion_compile.settings import Shape
from vllm_omni_diffusion_compile.warmup.declared import Answer, Outcome, Timing
from vllm_omni_diffusion_compile.warmup.report import ROUTE, Report, document

WARM = Outcome(
    shape=Shape(width=1344, height=768, frames=209),
    state="warm",
    requests=2,
    cold=Timing.of(Answer(preparation_s=0.25, compile_s=30.5, execution_s=40.5, transport_s=1.125), 41.875),
    warm=Timing.of(Answer(stages={"vae.decode": 2.5}), 9.5),
    compile_events=3,
    compile_s=30.5,
    peak_memory_mb=71234.0,
)
COLD = Outcome(shape=Shape(width=64, height=64), state="failed", reason="OutOfMemoryError: 80 GiB")


@pytest.fixture
def content() -> dict[str, Any]:
    report = Report(document([WARM, COLD], budget_s=600.0, spent_s=99.0, about={"model": "MODEL"}))
    report.add(
        [{"request": {"width": 96, "height": 96}, "component": "transformer", "region": "B", "seconds": 2, "at": 1}]
    )
    return report.content


@pytest.fixture
def path(content: dict[str, Any], tmp_path: Path) -> Path:
    file = tmp_path / "report.json"
    file.write_text(json.dumps(content))
    return file


class Handler(BaseHTTPRequestHandler):
    """A server with a report where ours has it, behind a key."""

    content: ClassVar[dict[str, Any] | None] = None

    def do_GET(self) -> None:
        found = self.path == ROUTE and self.content is not None
        allowed = self.headers.get("Authorization") == "Bearer secret"
        error = {"error": {"message": "there is no report: no shape was declared"}}
        self.send_response(401 if not allowed else 200 if found else 404)
        self.end_headers()
        self.wfile.write(json.dumps(self.content if found and allowed else error).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with HTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()
        thread.join()


def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["report", *arguments]) == 0
    return capsys.readouterr().out


def test_the_tables_say_what_is_warm_and_what_is_not(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = shown(capsys, monkeypatch, str(path))
    for part in ("1344x768x209", "41.88", "9.50", "30.5", "71234", "failed", "OutOfMemoryError: 80 GiB", "of 600 s"):
        assert part in text
    # Preparation, execution without the compiler, and output transport, each by itself.
    for part in ("0.250", "10.000", "1.125", "vae.decode 2.500"):
        assert part in text
    assert "- {width: 96, height: 96}" in text


def test_what_reads_like_markup_is_printed_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "could not open [/models/x], expected [b c h w], got [type=missing]"
    failed = Outcome(shape=Shape(width=64, height=64), state="failed", reason=reason)
    file = tmp_path / "report.json"
    file.write_text(json.dumps(document([failed], budget_s=None, spent_s=1.0, about={"model": "/m/[x]y"})))
    monkeypatch.setenv("COLUMNS", "200")
    text = shown(capsys, monkeypatch, str(file))
    assert reason in text
    assert "/m/[x]y: declared shapes" in text


def test_json_is_the_document_itself(
    path: Path, content: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert json.loads(shown(capsys, monkeypatch, str(path), "--json")) == content


def test_a_servers_address_is_enough_and_its_key_is_sent(
    server: str, content: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Handler, "content", content)
    assert "1344x768x209" in shown(capsys, monkeypatch, server)
    assert "1344x768x209" in shown(capsys, monkeypatch, f"{server}{ROUTE}")


def test_a_server_without_a_report_says_why(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", f"{server}/"]) == 2
    error = capsys.readouterr().err
    assert "answered 404: there is no report: no shape was declared" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is JSON, but no report"),
        ('{"shapes": []}', "is JSON, but no report"),
    ],
)
def test_what_is_no_report_is_one_line(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x").write_text(text)
    assert main(["report", str(tmp_path / "x")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_file_that_is_not_there_names_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "none.json")]) == 2
    assert "warmup.report_path" in capsys.readouterr().err


def test_nobody_listens(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "http://127.0.0.1:1"]) == 2
    assert "is the server ready?" in capsys.readouterr().err


def test_what_runs_eagerly_is_printed(content: dict[str, Any], path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_text(json.dumps(content | {"eager": ["vae decode (InvalidCxxCompiler)"]}))
    assert main(["report", str(path)]) == 0
    assert "runs eagerly: vae decode (InvalidCxxCompiler)." in capsys.readouterr().out
    # Of a server with an older release of this package.
    del content["eager"]
    path.write_text(json.dumps(content))
    assert main(["report", str(path)]) == 0


def test_a_pipe_is_wide_enough_for_the_table(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(["report", str(path)]) == 0
    assert "1344x768x209" in capsys.readouterr().out
