from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from PIL import Image

from tools.demo import server
from tools.demo.__main__ import main
from vllm_omni_diffusion_compile.bench import session

STAND_IN = Path(__file__).with_name("stand_in_vllm.py")


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts the stand-in where the demo looks for `vllm`, and takes the demo's hands off the signals afterwards."""
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, str(STAND_IN)])} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program.with_name("python")))
    monkeypatch.setattr(session, "_STOP_SIGNALS", [(number, 0.5) for number, _ in session._STOP_SIGNALS])
    monkeypatch.setattr("tools.tiny_checkpoints.checkpoint.run", lambda *_: tmp_path / "klein")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.chdir(tmp_path)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    assert not left_behind()
    assert not list((tmp_path / "tmp").iterdir())


def left_behind() -> list[psutil.Process]:
    """Processes whose command line names the folder of this test: those of the stand-in, wherever they went."""
    here = str(Path.cwd())
    return [process for process in psutil.process_iter(["cmdline"]) if here in str(process.info["cmdline"])]


def test_a_good_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert "Stock vLLM-Omni: 2 compilations ran after the server was ready" in out
    assert "With this package nothing was compiled after the server was ready" in out
    for name in ("ours", "stock"):
        assert Path("demo-output", f"{name}.log").is_file()
        for size in ((512, 512), (768, 640)):
            with Image.open(f"demo-output/{name}-{size[0]}x{size[1]}.png") as picture:
                assert picture.size == size


def test_what_an_earlier_run_left_is_not_taken_for_this_one() -> None:
    Path("demo-output").mkdir()
    Path("demo-output/stock-512x512.png").touch()
    assert main(["--stand-in", "refuse"]) == 1
    assert [file.name for file in Path("demo-output").iterdir()] == ["ours.log"]


def test_dynamic_shapes_are_compared_on_demand() -> None:
    assert main(["--all"]) == 0
    assert Path("demo-output/stock-dynamic-768x640.png").is_file()


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("refuse", "unrecognized arguments: --stand-in refuse"),
        ("error", "answered with status 500"),
        ("small", "a picture of 256x512"),
        ("recompile", "2 compilation(s) after ready, expected none"),
    ],
)
def test_what_fails_is_said_and_is_the_exit_status(what: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--stand-in", what]) == 1
    assert said in capsys.readouterr().out


def test_the_temporary_folder_is_private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with server.Server(tmp_path, (), plugins="diffusion_cpu", log=tmp_path / "log") as running:
        running.wait_ready(lambda _: None)
        folder = running.traces.parent
        assert folder.stat().st_mode & 0o777 == 0o700
        assert {path.name for path in folder.iterdir()} == {"vllm", "inductor", "triton", "torch-trace", "tmp"}
    assert not folder.exists()


def test_a_server_that_ignores_signals_and_its_children_are_killed(tmp_path: Path) -> None:
    flags = ("--stand-in", "stubborn")
    with server.Server(tmp_path, flags, plugins="diffusion_cpu", log=tmp_path / "log") as running:
        running.wait_ready(lambda _: None)
        assert len(left_behind()) == 3
    assert not left_behind()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_during_a_request_stops_the_server(number: signal.Signals, tmp_path: Path) -> None:
    def interrupt() -> None:
        while not (tmp_path / "requested").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert main(["--stand-in", "hang"]) == 128 + number
    thread.join()


def test_a_second_interrupt_does_not_keep_the_first_from_cleaning_up(tmp_path: Path) -> None:
    def interrupt() -> None:
        while not (tmp_path / "requested").exists():
            time.sleep(0.05)
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert main(["--stand-in", "hang"]) == 128 + signal.SIGINT
    thread.join()
