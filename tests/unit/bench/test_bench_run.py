"""`vllm-omni-compile bench` against a stand-in for `vllm serve`: processes, caches, order, failures."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from vllm_omni_diffusion_compile.bench import session
from vllm_omni_diffusion_compile.commands.main import main

STAND_IN = Path(__file__).with_name("stand_in_vllm.py")
MODEL = "a/model"
QUICK = ("--task", "image", "--shape", "64x64", "--requests", "2")

Does = Callable[..., None]


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts the stand-in where the bench looks for `vllm`, and looks afterwards at what is left."""
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, str(STAND_IN)])} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program.with_name("python")))
    monkeypatch.setattr(session, "_STOP_SIGNALS", [(signal.SIGINT, 0.5), (signal.SIGTERM, 0.5), (signal.SIGKILL, 9.0)])
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setenv("STAND_IN_ASKED", str(tmp_path / "asked"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.chdir(tmp_path)
    yield
    here = str(tmp_path)
    left = [process for process in psutil.process_iter(["cmdline"]) if here in str(process.info["cmdline"])]
    for process in left:
        process.kill()
    assert not left, "the bench left processes behind"
    assert not list((tmp_path / "tmp").iterdir()), "the bench left files behind"


@pytest.fixture
def behave(monkeypatch: pytest.MonkeyPatch) -> Does:
    """Says what the servers of an arm do, by an argument that they have."""
    return lambda **what: monkeypatch.setenv(
        "STAND_IN", json.dumps({argument.replace("_", "-"): does for argument, does in what.items()})
    )


def bench(*arguments: str, arms: tuple[str, ...] = ("eager", "regional")) -> tuple[int, dict[str, Any]]:
    chosen = [part for arm in arms for part in ("--arm", arm)]
    status = main(["bench", MODEL, *QUICK, *chosen, "--json", "out.json", *arguments])
    return status, json.loads(Path("out.json").read_text())


def unmeasured(document: dict[str, Any]) -> dict[str, str]:
    return {arm["name"]: arm["not_measured"] for arm in document["arms"] if arm["not_measured"]}


def test_arms_alternate_and_the_second_start_has_the_cache_of_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    status, document = bench("--shape", "128x64", "--steps", "4", "--", "--dtype", "bfloat16")
    assert status == 0
    starts = document["starts"]
    assert [(start["arm"], start["cold"]) for start in starts] == [
        *(("eager", True), ("regional-dynamic", True), ("regional-dynamic", False), ("eager", False)),
    ]
    cold, warm = starts[1:3]
    seconds = [
        sum(metric["value"] for metric in start["metrics"] if metric["name"].endswith("_s_total"))
        for start in (cold, warm)
    ]
    assert seconds == [9.5, 1.5]
    # The first request of each shape, then two of each in turn.
    assert [(sample["shape"], sample["first"]) for sample in cold["samples"]] == [
        *((0, True), (1, True), (0, False), (1, False), (1, False), (0, False)),
    ]
    assert document["plan"]["bodies"][1] == {
        "prompt": "a lighthouse on a cliff, in the evening", "size": "128x64", "seed": 1, "num_inference_steps": 4,
        "n": 1,
    }  # fmt: skip
    for start in starts:
        assert start["command"][1:4] == ["serve", MODEL, "--omni"]
        assert start["command"][start["command"].index("--dtype") + 1] == "bfloat16"
        assert start["report"] == (None if start["arm"] == "eager" else {"version": 1, "shapes": []})
    out = capsys.readouterr().out
    # The stand-in takes 200 ms eagerly and 20 ms compiled.
    assert "regional-dynamic: a request to regional-dynamic takes" in out
    assert "vllm serve a/model --omni --diffusion-compile-granularity regional" in out
    assert "--dtype bfloat16" in out
    assert "cache_dir" not in out
    assert "2.00" in out  # GiB


def test_no_cache_is_inherited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache of the user's would make a cold start warm."""
    shown = tmp_path / "shown"
    program = tmp_path / "bin" / "vllm"
    program.write_text(f"#!/bin/sh\nenv >> {shown}\nexit 3\n")
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_DISABLE_COMPILE_CACHE", "VLLM_CACHE_ROOT"):
        monkeypatch.setenv(name, "the user's")
    monkeypatch.setenv("HF_HOME", "kept")
    assert bench()[0] == 1
    assert "the user's" not in shown.read_text()
    assert "HF_HOME=kept" in shown.read_text()


def test_together_every_request_goes_to_one_server_after_the_other() -> None:
    status, document = bench("--together")
    assert status == 0
    assert [(start["arm"], start["cold"]) for start in document["starts"]] == [
        *(("eager", True), ("regional-dynamic", True), ("regional-dynamic", False), ("eager", False)),
    ]
    warm = document["starts"][2:]
    asked = sorted((sample["at"], start["arm"]) for start in warm for sample in start["samples"] if not sample["first"])
    r, e = "regional-dynamic", "eager"
    assert [arm for _, arm in asked] == [r, e, e, r, r, e, e, r]
    assert [sample["block"] for sample in warm[0]["samples"] if not sample["first"]] == [0, 0, 1, 1]


def test_a_server_that_dies_costs_its_own_arm(behave: Does, capsys: pytest.CaptureFixture[str]) -> None:
    behave(full="die")
    status, document = bench(arms=("full", "eager", "regional"))
    assert status == 1
    (reason,) = unmeasured(document).values()
    assert reason.startswith("the server ended with status 1 after ") and reason.endswith("in its cold start")
    assert [start["arm"] for start in document["starts"]].count("full-dynamic") == 1
    out = capsys.readouterr().out
    assert "no kernel, says the stand-in" in out
    assert "full-dynamic is out of account" in out
    assert "regional-dynamic: a request to" in out


def test_a_server_that_never_gets_ready(behave: Does) -> None:
    behave(regional="unhealthy")
    began = time.monotonic()
    status, document = bench("--ready-timeout", "1")
    assert status == 1
    assert "was not ready after 1 s (--ready-timeout)" in unmeasured(document)["regional-dynamic"]
    assert time.monotonic() - began < 20


def test_a_server_that_answers_500(behave: Does, capsys: pytest.CaptureFixture[str]) -> None:
    behave(regional="fail-second")
    status, document = bench()
    assert status == 1
    assert (
        "/v1/images/generations answered 500, expected 200: out of memory, says the stand-in"
        in unmeasured(document)["regional-dynamic"]
    )
    assert "Nothing is recommended: only eager was measured completely." in capsys.readouterr().out


def test_what_does_not_end_by_itself_is_killed_with_all_its_children(behave: Does) -> None:
    """Its cold start runs alone, its warm one beside others."""
    behave(regional="stubborn")
    assert bench("--together")[0] == 0


def test_an_arm_that_does_not_fit_in_the_budget_is_named(behave: Does, capsys: pytest.CaptureFixture[str]) -> None:
    behave(full="unhealthy")
    status, document = bench("--budget", "12", arms=("eager", "full", "regional"))
    assert status == 1
    assert unmeasured(document).keys() == {"full-dynamic"}
    assert unmeasured(document)["full-dynamic"].startswith("--budget 12 does not suffice: the server was not ready")
    assert document["seconds"] < 14
    assert "full-dynamic was not measured: --budget 12" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing(
    number: signal.Signals, behave: Does, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    behave(regional="hang")

    def interrupt() -> None:
        while not (tmp_path / "asked").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    before = signal.getsignal(signal.SIGINT)
    status, document = bench()
    thread.join()
    assert status == 128 + number
    assert signal.getsignal(signal.SIGINT) is before
    assert "no process is left" in capsys.readouterr().err
    # What was measured before is there.
    assert document["starts"][0]["arm"] == "eager" and document["starts"][0]["ready_s"] is not None


def test_logs_are_kept_where_they_are_asked_for() -> None:
    bench("--logs", "logs")
    assert {path.name for path in Path("logs").iterdir()} == {
        *("eager-0.log", "eager-1.log", "regional-dynamic-0.log", "regional-dynamic-1.log"),
    }
    assert all(path.stat().st_mode & 0o077 == 0 for path in Path("logs").iterdir())


def test_the_key_of_the_server_is_sent_and_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "a-secret")
    bench()
    assert "a-secret" not in Path("out.json").read_text()


def test_the_same_figures_from_the_file_alone(capsys: pytest.CaptureFixture[str]) -> None:
    bench("--plot", "first.png")
    first = capsys.readouterr().out
    assert main(["bench", "--from", "out.json", "--json", "again.json", "--plot", "again.png"]) == 0
    assert capsys.readouterr().out == first
    assert Path("again.json").read_text() == Path("out.json").read_text()
    assert Path("again.png").read_bytes() == Path("first.png").read_bytes()
    assert Path("first.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "--from there.json: No such file"),
        ("no JSON", "--from there.json is no result of this bench: the whole"),
        ('{"version": 2}', "--from there.json is no result of this bench: version"),
    ],
)
def test_files_that_are_no_result(text: str | None, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    if text is not None:
        Path("there.json").write_text(text)
    assert main(["bench", "--from", "there.json"]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--arm", "eager+vae"], "contradicts itself"),
        (["--arm", "regional+rainfusion"], "this model makes images"),
        (["--shape", "64"], "expected WIDTHxHEIGHT"),
        (["--shape", "64x64"], "--shape 64x64 is there twice"),
        (["--shape", '{"width": 64, "depth": 64}'], "unknown key '--shape [1].depth'"),
        (["--shape", "64x64x25"], "has frames, and this model makes images"),
        (["--shape", '{"width": 64, "height": 32, "images": 1}'], "sends no input pictures"),
        (["--rounds", "1"], "--rounds is 1, expected at least 2"),
        (["--requests", "0"], "--requests is 0, expected at least 1"),
        (["--request", "[1]"], "is no JSON object"),
        (["--plot", "nowhere/plot.png"], "--plot nowhere/plot.png: there is no folder nowhere"),
        (["--from", "x.json"], "--from runs nothing"),
        (["--", "--enforce-eager"], "--enforce-eager after --"),
    ],
)
def test_what_is_refused_before_anything_starts(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    assert main(["bench", MODEL, *QUICK, *arguments]) == 2
    assert says in capsys.readouterr().err


def test_servers_that_would_not_load_this_package_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "diffusion_cpu")
    assert main(["bench", MODEL, *QUICK]) == 2
    assert "VLLM_PLUGINS is 'diffusion_cpu'" in capsys.readouterr().err


def test_a_model_that_makes_neither_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host = tmp_path / "bin" / "python"
    host.write_text("""#!/bin/sh\necho noise\necho '{"pipeline": "P", "makes": "audio"}'\n""")
    host.chmod(0o755)
    assert main(["bench", MODEL]) == 2
    assert "a/model makes audio; the bench asks for images or videos" in capsys.readouterr().err


def test_an_arm_whose_attention_stayed_dense_is_not_taken_for_a_sparse_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STAND_IN", '{"--enforce-eager": "dense"}')
    shape = '{"width": 64, "height": 64, "frames": 25}'
    arms = ("--arm", "eager", "--arm", "eager+rainfusion")
    assert main(["bench", MODEL, "--shape", shape, *arms, "--requests", "1", "--json", "out.json"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "eager+rainfusion: dense attention in some calls, those of the start included (64 video rows are" in said
    assert "eager: dense" not in said
    starts = json.loads(Path("out.json").read_text())["starts"]
    reasons = {start["arm"]: start["stayed_dense"] for start in starts}
    assert reasons == {"eager": [], "eager+rainfusion": ["64 video rows are fewer than 4096"]}


def test_videos_are_asked_for_by_a_form(tmp_path: Path) -> None:
    status = main(
        [
            *(
                "bench",
                MODEL,
                "--shape",
                '{"width": 64, "height": 64, "frames": 25, "lora": {"path": "a/b"}, "extra_args": {"a": 1}}',
            ),
            *("--arm", "eager", "--arm", "eager+rainfusion", "--requests", "1", "--request", '{"fps": 24}'),
            *("--json", "out.json"),
        ]
    )
    assert status == 0
    document = json.loads(Path("out.json").read_text())
    assert (document["plan"]["task"], document["plan"]["task_from"]) == ("video", "--shape has frames")
    assert document["plan"]["bodies"][0]["num_frames"] == 25
    assert document["plan"]["bodies"][0]["extra_params"] == {"a": 1}
    assert document["plan"]["bodies"][0]["lora"] == {"name": "b", "path": "a/b"}
