"""The report on a start as a file: whole or not at all, private, and growing by what users meet."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_omni_diffusion_compile.settings import Shape, read_config
from vllm_omni_diffusion_compile.warmup import report as module
from vllm_omni_diffusion_compile.warmup.declared import Outcome
from vllm_omni_diffusion_compile.warmup.report import Report, as_text, as_yaml, document, write


def content(*outcomes: Outcome) -> dict[str, Any]:
    return document(outcomes, budget_s=None, spent_s=1.0, about={"model": "M"})


def compilation(shape: dict[str, Any] | None, region: str = "Block", seconds: float = 2.0) -> dict[str, Any]:
    return {"request": shape, "component": "transformer", "region": region, "seconds": seconds, "at": 1.0}


def test_only_its_owner_can_read_it_and_nothing_else_is_left_behind(tmp_path: Path) -> None:
    path = tmp_path / "made" / "report.json"
    write(path, content(Outcome(shape=Shape(width=64, height=64), state="warm")))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text())["shapes"][0]["name"] == "64x64"
    assert [file.name for file in path.parent.iterdir()] == ["report.json"]


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    write(path, {"old": True})

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    failures: list[OSError] = []
    report = Report(content(), path, failures.append)
    report.write()
    report.write()
    assert len(failures) == 1
    assert json.loads(path.read_text()) == {"old": True}
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]


def test_undeclared_shapes_are_summed_up_and_written_soon(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    report = Report(content(), path, every_s=0.05)
    report.write()
    shape = {"width": 96, "height": 96}
    report.add([compilation(shape), compilation(shape, "Single"), compilation(None)])
    report.add([compilation({"width": 32, "height": 32})])
    deadline = time.monotonic() + 5
    while len(found := json.loads(path.read_text())["undeclared"]) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [entry["shape"] for entry in found] == [shape, {"width": 32, "height": 32}]
    assert (found[0]["compile_events"], found[0]["compile_s"]) == (2, 4.0)
    assert found[0]["regions"] == ["transformer Block", "transformer Single"]


def test_it_is_not_written_for_each_of_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[float] = []
    monkeypatch.setattr(module, "write", lambda path, report: written.append(time.monotonic()))
    report = Report(content(), tmp_path / "report.json", every_s=0.2)
    report.write()
    for width in range(50):
        report.add([compilation({"width": width, "height": 1})])
    time.sleep(0.5)
    assert len(written) == 2 and written[1] - written[0] >= 0.19


def test_shapes_without_end_are_counted_and_not_kept() -> None:
    report = Report(content())
    report.add([compilation({"width": width, "height": 1}) for width in range(module.MOST_UNDECLARED + 7)])
    assert len(report.content["undeclared"]) == module.MOST_UNDECLARED
    assert report.content["undeclared_left_out"] == 7


def test_what_is_to_be_pasted_is_read_back_as_what_it_says() -> None:
    shape = {"width": 64, "height": 96, "frames": 107, "negative_prompt": "a: b, {c}", "images": ["320x320"]}
    shape |= {"guidance_scale": 4.5, "extra_args": {"aspect_ratio": "1:1", "task": "ref2va", "flag": True}}
    pasted = yaml.safe_load(f"shapes:\n  {as_yaml(shape)}\n")
    assert pasted == {"shapes": [shape]}
    assert read_config({"warmup": pasted}).warmup.shapes[0].frames == 107


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"steps": 4, "prompt_rows": 5},
        {"width": 64, "height": 64, "guidance_scale": 1e-05},
        {"width": 64, "height": 64, "guidance_scale": 1e17},
        {"width": 64, "height": 64, "extra_args": {"on": 1e-07, "1": "on", "a: b": "- c", "": "null", "- d": "1e3"}},
    ],
)
def test_whatever_is_pasted_is_read_as_it_was_met(shape: dict[str, Any]) -> None:
    (pasted,) = yaml.safe_load(as_yaml(shape))
    assert pasted == shape
    assert read_config({"warmup": {"shapes": [pasted]}}).warmup.shapes[0].model_dump(exclude_unset=True) == shape


def test_a_request_that_states_nothing_is_remembered_too() -> None:
    report = Report(document([], budget_s=None, spent_s=0, about={}))
    report.add([{"request": {}, "component": "transformer", "region": "Block", "seconds": 2.0, "at": 1.0}])
    report.add([{"request": None, "component": "transformer", "region": "Block", "seconds": 2.0, "at": 1.0}])
    (entry,) = report.content["undeclared"]
    assert (entry["shape"], entry["compile_events"]) == ({}, 1)


def test_the_table_names_state_and_reason() -> None:
    failed = Outcome(shape=Shape(width=64, height=64, frames=9), state="failed", reason="OutOfMemoryError: 80 GiB")
    text = as_text(content(failed))
    assert "64x64x9" in text and "failed" in text and "OutOfMemoryError" in text


def test_the_table_says_what_runs_eagerly_though_its_shapes_are_warm() -> None:
    assert "eagerly" not in as_text(content())
    eager = ["transformer Block (InvalidCxxCompiler)", "vae decode (InvalidCxxCompiler)"]
    report = document([], budget_s=None, spent_s=1.0, about={}, eager=eager)
    assert as_text(report).splitlines()[-1] == f"Could not be compiled, and runs eagerly: {eager[0]}, {eager[1]}."
