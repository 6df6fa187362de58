"""A declared shape that hangs in a real server: the start goes on, or ends with an error that names the shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.serve.server import Server

pytestmark = [pytest.mark.serve, pytest.mark.timeout(600)]

READY_S = 300.0
# MiniMax-H3 has no dummy run: the budget is the hanging request's alone.
BUDGET_S = 8
PROBE = {"PYTHONPATH": str(Path(__file__).parent / "probe"), "PROBE_HANG_WIDTH": "256"}


def options(on_failure: str, report: Path) -> tuple[str, ...]:
    # What Dynamo traced, as it is: nothing that takes minutes is compiled.
    warmup = {"shapes": ["256x256"], "budget_s": BUDGET_S, "on_failure": on_failure, "report_path": str(report)}
    config = json.dumps({"backend": "eager", "warmup": warmup})
    return ("--no-diffusion-compile-vae", "--diffusion-compile-config", config)


def test_the_server_starts_without_it(h3: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    with Server(h3, "--trust-remote-code", *options("serve", report), env=PROBE, ready_timeout_s=READY_S) as server:
        assert server.get("/health").status_code == 200
        (shape,) = json.loads(report.read_text())["shapes"]
        assert shape["state"] == "gave up" and f"budget of {BUDGET_S} s" in shape["reason"]
        assert "users' requests wait until it ends" in server.log


@pytest.mark.parametrize("executor", [(), ("--distributed-executor-backend", "mp")], ids=["inline", "mp"])
def test_the_start_ends_where_that_is_asked_for(h3: Path, tmp_path: Path, executor: tuple[str, ...]) -> None:
    server = Server(
        h3,
        "--trust-remote-code",
        *options("fail", tmp_path / "report.json"),
        *executor,
        env=PROBE,
        ready_timeout_s=READY_S,
    )
    server.start()
    try:
        assert server.wait(READY_S) not in (None, 0), server.tail()
        assert "WarmupError: declared shapes are not warm: 256x256 gave up" in server.log
        assert server.left_behind() == []
    finally:
        server.stop()
