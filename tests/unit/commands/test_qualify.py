"""What becomes of a combination, without a model: arms that say what they are told to."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.unit.evidence.rows import KEY, TRACE, validated
from vllm_omni_diffusion_compile.commands import qualify_arm, qualify_run
from vllm_omni_diffusion_compile.commands.main import main
from vllm_omni_diffusion_compile.commands.qualify_process import Processes
from vllm_omni_diffusion_compile.evidence import Row, read_rows, revision, versions, write_rows
from vllm_omni_diffusion_compile.evidence.suite import again

NAMES = ("component/transformer", "latents/transformer.x of call 1", "artefact 1")
# What a worker knows of a key.
KNOWN = {name: KEY[name] for name in KEY if name not in ("task", "api_mode", "shape", "schedule", "bucket")}
ARRAY = np.linspace(-1, 1, 64, dtype=np.float32)

Change = Callable[[dict[str, Any], dict[str, Any]], None]


def answered(folder: Path, change: Change | None = None) -> dict[str, Any]:
    """Write what an arm writes, changed by a function of its result and its arrays."""
    arm = json.loads((folder / "arm.json").read_text())
    eager = arm["settings"].get("enforce_eager", False)
    key = KNOWN | {"dtype": arm["settings"].get("dtype", "bfloat16"), "scheduler": "Scheduler"}
    key |= {"compile_scope": "eager", "dynamic": None} if eager else {}
    trace = TRACE | ({"compiled_calls": 0} if eager else {})
    result: dict[str, Any] = {
        "key": key, "trace": dict(trace), "packed": None, "not_as_asked": [], "environment": {"a": "b"},
        "revision": revision(Path(arm["checkpoint"])) if Path(arm["checkpoint"]).is_dir() else "a hash",
        "versions": versions(),
    }  # fmt: skip
    noise = 0 if arm["in_fp32"] or arm["settings"].get("dtype") == "float32" else 1e-3 * np.sin(7 * ARRAY)
    arrays: dict[str, Any] = dict.fromkeys(NAMES, ARRAY + noise)
    if change is not None:
        change(result, arrays)
    artefact: dict[str, Any] = {NAMES[2]: arrays.pop(NAMES[2])}
    np.savez(folder / "seen.npz", **arrays)
    np.savez(folder / "artefact.npz", **artefact)
    return result


@pytest.fixture
def qualify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Row]:
    """Qualify one combination, whose subject is changed by a function of its result and its arrays."""

    def qualified(change: Change | None = None, *, settings: Any = None, devices: int = 1, **declared: Any) -> Row:
        def run(_: Processes, folder: Path, __: float) -> dict[str, Any]:
            return answered(folder, change if folder.name == "combination" else None)

        monkeypatch.setattr(Processes, "run", run)
        monkeypatch.setattr(qualify_run, "device_count", lambda: 1)
        suite = {
            "models": {
                "m": {"checkpoint": "m", "task": "text-to-image", "settings": settings or {}, "request": {"seed": 1}}
            },
            "combinations": [{"id": "combination", "model": "m", "devices": devices, **declared}],
        }
        (tmp_path / "suite.yaml").write_text(json.dumps(suite))
        status = main(["qualify", "--suite", str(tmp_path / "suite.yaml"), "--out", str(tmp_path / "out")])
        (row,) = read_rows(tmp_path / "out" / "rows.jsonl")
        assert status == (row.state == "failed")
        return row

    return qualified


def _off(result: dict[str, Any], arrays: dict[str, Any]) -> None:
    arrays[NAMES[0]] = arrays[NAMES[0]] + 2e-3 * np.cos(5 * ARRAY)


def _fallback(result: dict[str, Any], arrays: dict[str, Any]) -> None:
    result["trace"]["fallbacks"] = 1


def _never_compiled(result: dict[str, Any], arrays: dict[str, Any]) -> None:
    result["trace"]["compiled_calls"] = 0


def _asked_for_sparse(result: dict[str, Any], arrays: dict[str, Any]) -> None:
    result["key"]["attention_backend"] = "RAINFUSION_ATTN, sparsity 0.5"


def _ran_sparse(result: dict[str, Any], arrays: dict[str, Any]) -> None:
    _asked_for_sparse(result, arrays)
    result["trace"]["operators"] = {"RAINFUSION_ATTN flex": 4}


def _never_decoded_compiled(result: dict[str, Any], arrays: dict[str, Any]) -> None:
    result["key"]["vae_policy"] = "always"


def _decoded_compiled(result: dict[str, Any], arrays: dict[str, Any]) -> None:
    result["key"]["vae_policy"] = "always"
    result["trace"]["decode_compiled_calls"] = 1


def _other_attention(result: dict[str, Any], arrays: dict[str, Any]) -> None:
    result["not_as_asked"] = ["FLASH_ATTN was asked for, and only SDPA ran"]


def _did_less(result: dict[str, Any], arrays: dict[str, Any]) -> None:
    del arrays[NAMES[1]]


def _refused(result: dict[str, Any], arrays: dict[str, Any]) -> None:
    result["error"] = {"type": "SettingError", "message": f"mode is refused in {Path.cwd()}/file"}


def _crashed(result: dict[str, Any], arrays: dict[str, Any]) -> None:
    result["error"] = {"type": "RuntimeError", "message": "out of memory"}


def test_what_agrees_is_validated(qualify: Callable[..., Row]) -> None:
    row = qualify()
    assert row.state == "validated"
    assert [figure.value for figure in row.figures] == [pytest.approx(1.0)] * 4
    assert row.key.schedule == "Scheduler, default steps"


def test_a_row_over_http_has_an_oracle_that_is_a_program(qualify: Callable[..., Row], tmp_path: Path) -> None:
    row = qualify(api="http")
    assert (row.state, row.key.api_mode, row.key.output_transport) == ("validated", "http", "PNG over HTTP")
    asked = {file.parent.name: json.loads(file.read_text())["api"] for file in tmp_path.glob("out/*/arm.json")}
    assert asked.pop("combination") == "http" and set(asked.values()) == {"offline"}
    assert again(row).api == "http"


def test_fp32_needs_no_reference(qualify: Callable[..., Row], tmp_path: Path) -> None:
    row = qualify(settings={"dtype": "float32"})
    assert row.state == "validated" and not list((tmp_path / "out").glob("oracle-fp32-*"))


def test_eager_again_is_the_same_to_the_bit(qualify: Callable[..., Row]) -> None:
    row = qualify(settings={"enforce_eager": True})
    assert row.state == "validated" and {(item.value, item.bound) for item in row.figures} == {(0.0, 0.0)}


def test_a_decode_that_ran_compiled_is_validated(qualify: Callable[..., Row]) -> None:
    assert qualify(_decoded_compiled).state == "validated"


def test_sparse_attention_that_ran_is_validated(qualify: Callable[..., Row]) -> None:
    assert qualify(_ran_sparse).state == "validated"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_off, "transformer: "),
        (_fallback, "1 fallback(s): what they answered was eager"),
        (_never_compiled, "no compiled code was called"),
        (_asked_for_sparse, "no sparse attention ran"),
        (_never_decoded_compiled, "vae_policy is 'always', and no compiled decode was called"),
        (_other_attention, "FLASH_ATTN was asked for, and only SDPA ran"),
        (_did_less, "not seen in all runs: latents/transformer.x of call 1"),
        (_refused, "SettingError: mode is refused in ./file"),
        (_crashed, "RuntimeError: out of memory"),
    ],
)
def test_what_does_not_hold_fails_and_says_why(qualify: Callable[..., Row], change: Change, said: str) -> None:
    row = qualify(change)
    assert row.state == "failed" and row.reason is not None and said in row.reason


def test_what_is_declared_as_refused_is_rejected_with_the_error(qualify: Callable[..., Row]) -> None:
    row = qualify(_refused, refused="mode is refused")
    assert row.state == "rejected" and row.reason == "SettingError: mode is refused in ./file"


@pytest.mark.parametrize(("change", "said"), [(None, "it started"), (_crashed, "out of memory")])
def test_what_is_declared_as_refused_and_is_not_fails(qualify: Callable[..., Row], change: Any, said: str) -> None:
    row = qualify(change, refused="mode is refused")
    assert row.state == "failed" and said in str(row.reason)


def test_what_needs_more_devices_is_not_tested(qualify: Callable[..., Row]) -> None:
    row = qualify(devices=2)
    assert row.state == "not tested" and row.reason == "it needs 2 devices, and there is 1"


def test_a_checkpoint_that_is_not_there_is_not_tested(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["qualify", "--model", "./missing", "--request", '{"seed": 1}', "--out", str(tmp_path)]
    assert main(command) == 0
    (row,) = read_rows(tmp_path / "rows.jsonl")
    assert row.state == "not tested" and row.reason == "the checkpoint ./missing is not there"


def test_a_picture_is_part_of_what_a_row_says(
    qualify: Callable[..., Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    request = {"images": ["cat.png"]}
    row = qualify(request=request)
    assert (row.state, row.reason) == ("not tested", "request.images: cat.png is not there")
    oracles: list[set[str]] = []
    for content in (b"a cat", b"another cat"):
        Path("cat.png").write_bytes(content)
        row = qualify(request=request)
        assert row.provenance is not None
        assert row.provenance.assets == {"cat.png": hashlib.sha256(content).hexdigest()}
        oracles.append({name for name in row.provenance.artefacts if name.startswith("oracle")})
    assert not oracles[0] & oracles[1]
    Path("cat.png").write_bytes(b"a third cat")
    assert main(["qualify", "--row", "out/rows.jsonl#combination", "--out", "again"]) == 2
    assert "cat.png is another picture than that of the row" in capsys.readouterr().err
    assert not Path("again").exists()


def test_a_picture_that_changes_while_it_is_asked_about_fails_the_arm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cat.png").write_bytes(b"a cat")
    known = hashlib.sha256(b"a cat").hexdigest()
    arm = {"checkpoint": "m", "settings": {}, "request": {}, "in_fp32": False, "api": "offline"}
    Path("arm.json").write_text(json.dumps(arm | {"assets": {"cat.png": known}}))

    def answer(arm: Any, folder: Path) -> dict[str, Any]:
        Path("cat.png").write_bytes(b"another cat")
        return {}

    monkeypatch.setattr("vllm_omni_diffusion_compile.plugin.register", lambda: None)
    monkeypatch.setattr("vllm_omni_diffusion_compile.upstream.arm.run_arm", answer)
    monkeypatch.setattr("os._exit", lambda status: None)
    qualify_arm.main(tmp_path)
    error = json.loads(Path("result.json").read_text())["error"]
    assert error["message"] == "request.images: cat.png has changed since the run began"


def test_a_process_that_dies_or_hangs_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, script in {"dies": "#!/bin/sh\nexit 3\n", "hangs": "#!/bin/sh\nsleep 60\n"}.items():
        python = tmp_path / name
        python.write_text(script)
        python.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(python))
        result = Processes().run(tmp_path, 1.0)
        said = {"dies": "ended with status 3 and no result", "hangs": "no answer within 1 s"}[name]
        assert said in result["error"]["message"]


SUITE = {
    "models": {"m": {"checkpoint": "m", "task": "text-to-image", "request": {"seed": 1}}},
    "combinations": [
        {"id": "long", "model": "m"},
        {"id": "short", "model": "m", "settings": {"diffusion_compile_granularity": "full"}},
        {"id": "refused", "model": "m", "refused": "mode is refused", "settings": {"mode": "other"}},
    ],
}


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    file = tmp_path / "suite.yaml"
    file.write_text(json.dumps(SUITE))
    return file


def test_several_run_at_once_each_oracle_once_and_rows_are_in_order(
    suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []
    together = threading.Barrier(2, timeout=20)
    written = tmp_path / "out" / "rows.jsonl"

    def run(_: Processes, folder: Path, __: float) -> dict[str, Any]:
        ran.append(folder.name)
        if folder.name in ("long", "short"):
            together.wait()
        if folder.name == "refused":
            return {"error": {"type": "SettingError", "message": "mode is refused"}}
        if folder.name == "long":  # the others have their turns and their rows meanwhile
            deadline = time.monotonic() + 20
            while not written.exists() or len(read_rows(written)) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        return answered(folder)

    monkeypatch.setattr(Processes, "run", run)
    assert main(["qualify", "--suite", str(suite), "--out", str(tmp_path / "out"), "--jobs", "2"]) == 0
    assert [row.id for row in read_rows(written)] == ["long", "short", "refused"]
    assert [row.state for row in read_rows(written)] == ["validated", "validated", "rejected"]
    assert len([name for name in ran if name.startswith("oracle")]) == 2, "one in bf16 and one in fp32, for both"
    said = capsys.readouterr().err
    assert "running long, short" in said or "running short, long" in said


def test_of_several_at_once_those_that_take_longest_begin(
    suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared = json.loads(suite.read_text())
    for combination, seconds in zip(declared["combinations"], (0, 10, 20), strict=True):
        combination["takes_s"] = seconds
    suite.write_text(json.dumps(declared))
    ran: list[str] = []
    together = threading.Barrier(2, timeout=20)

    def run(_: Processes, folder: Path, __: float) -> dict[str, Any]:
        ran.append(folder.name)
        if len(ran) <= 2:
            together.wait()
        return {"error": {"type": "SettingError", "message": "mode is refused"}}

    monkeypatch.setattr(Processes, "run", run)
    main(["qualify", "--suite", str(suite), "--out", str(tmp_path / "out"), "--jobs", "2"])
    assert set(ran[:2]) == {"refused", "short"} and ran[2:] == ["long"]


def test_processes_side_by_side_neither_spin_nor_meet_at_a_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nenv > {tmp_path}/environment\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("MASTER_PORT", "29500")
    for said, has in ((None, "PASSIVE"), ("ACTIVE", "ACTIVE")):
        monkeypatch.setenv("OMP_WAIT_POLICY", said) if said else monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
        Processes().run(tmp_path, 20)
        environment = (tmp_path / "environment").read_text().splitlines()
        assert f"OMP_WAIT_POLICY={has}" in environment and "MASTER_PORT=29500" not in environment


def test_an_oracle_is_reused_on_the_same_machine_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    ran: list[str] = []

    def run(_: Processes, folder: Path, __: float) -> dict[str, Any]:
        ran.append(folder.name.partition("-")[0])
        result = answered(folder)
        (folder / "result.json").write_text(json.dumps(result))
        return result

    def again() -> list[str]:
        ran.clear()
        command = ["qualify", "--model", str(checkpoint), "--request", '{"seed": 1}', "--out", str(tmp_path / "out")]
        assert main([*command, "--reuse-oracles"]) == 0
        return ran

    monkeypatch.setattr(Processes, "run", run)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert again() == ["combination", "oracle", "oracle"]
    assert again() == ["combination"]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert again() == ["combination", "oracle", "oracle"]
    assert again() == ["combination"]
    monkeypatch.setattr(qualify_run, "hardware", lambda: "another machine")
    assert again() == ["combination", "oracle", "oracle"]


def test_a_process_that_nothing_ends_is_named_to_who_stops_it(
    suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(processes: Processes, folder: Path, _: float) -> dict[str, Any]:
        processes.left.append("a worker in uninterruptible sleep")
        signal.raise_signal(signal.SIGINT)
        time.sleep(1)
        return answered(folder)

    monkeypatch.setattr(Processes, "run", run)
    assert main(["qualify", "--suite", str(suite), "--out", str(tmp_path / "out")]) == 128 + signal.SIGINT
    said = capsys.readouterr().err
    assert "stopped by SIGINT; still there after SIGKILL: a worker in uninterruptible sleep" in said
    assert "no process is left" not in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_who_stops_it_stops_all_that_it_started(suite: Path, tmp_path: Path, number: signal.Signals) -> None:
    python = tmp_path / "python"
    # A child in a session of its own, as a server's is.
    python.write_text(
        f"#!{sys.executable} -IS\n"
        "import pathlib, subprocess, sys, os\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "said = pathlib.Path(sys.argv[-1], 'pids')\n"
        "said.with_suffix('.part').write_text(f'{os.getpid()} {child.pid}')\n"
        "said.with_suffix('.part').rename(said)\n"
        "child.wait()\n"
    )
    python.chmod(0o755)
    script = (
        f"import signal, sys; sys.executable = {str(python)!r}\n"
        # Whoever runs the tests may have been told to ignore it, as nohup tells.
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        "from vllm_omni_diffusion_compile.commands.main import main\n"
        f"sys.exit(main(['qualify', '--suite', {str(suite)!r}, '--out', {str(tmp_path / 'out')!r}, '--jobs', '2']))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    started = [tmp_path / "out" / name / "pids" for name in ("long", "short")]
    deadline = time.monotonic() + 60
    while not all(file.exists() for file in started):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + number and f"stopped by {number.name}; no process is left" in said
    pids = [int(word) for file in started for word in file.read_text().split()]
    living = [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
    assert not living


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--suite", "tiny", "--only", "other"], "--only other: tiny has no such combination"),
        (["--row", "rows.jsonl"], "names no row"),
        (["--row", "rows.jsonl#a", "--only", "a"], "--only and --evidence go with --suite"),
        (["--model", "m", "--settings", "{"], "--settings and --request take JSON"),
        (["--model", "m"], "request.seed is None, expected a whole number"),
        (["--suite", "tiny", "--jobs", "0"], "--jobs is 0, expected at least 1"),
    ],
)
def test_what_is_wrong_on_the_command_line_is_said(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["qualify", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_row_that_is_run_again_is_compared_with_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    write_rows(file, [validated()])
    before = file.read_text()
    monkeypatch.setattr(qualify_run.Run, "row", lambda self, declared: validated(shape="256x256"))
    assert main(["qualify", "--row", f"{file}#klein", "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "other than in the row: shape: '256x256', and '128x128' in the row" in out
    assert "figures: the same to the last digit" in out
    assert file.read_text() == before, "a row that is run again is not written"
