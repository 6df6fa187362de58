"""`vllm-omni-compile buckets`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_omni_diffusion_compile.commands.main import main
from vllm_omni_diffusion_compile.settings import read_config

LINES: list[dict[str, Any]] = [
    {"task": "t2va", "width": 1344, "height": 768, "frames": 209, "prompt_rows": 100, "count": 3},
    {"task": "fl2va", "width": 1344, "height": 768, "seconds": 7, "keyframes": 2, "prompt_rows": 400},
    {"width": 672, "height": 384, "frames": 209, "prompt_rows": 40, "count": 10},
]
USED = [63_292, 53_000 + 2 * 1008 + 400, 16_360]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, LINES)))
    return path


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["buckets", *arguments, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert isinstance(printed, dict)
    return printed


def test_json_has_the_requests_in_order_and_the_buckets(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = document(capsys, "--trace", str(trace), "--count", "2")
    assert [request["used_rows"] for request in printed["requests"]] == USED
    assert printed["buckets"] == [16_384, 63_296]
    assert [request["bucket"] for request in printed["requests"]] == [63_296, 63_296, 16_384]
    assert [request["packed_rows"] for request in printed["requests"]] == [63_296, 55_424, 16_384]
    padded = 3 * 4 + (63_296 - USED[1]) + 10 * 24
    assert printed["padded_rows"] == padded
    assert printed["mean_waste"] == pytest.approx(padded / (3 * 63_296 + 63_296 + 10 * 16_384))
    assert printed.keys() == {"requests", "buckets", "padded_rows", "mean_waste"}


def test_waste_takes_the_fewest_buckets_that_keep_it(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(document(capsys, "--trace", str(trace), "--waste", "0.001")["buckets"]) == 3
    assert len(document(capsys, "--trace", str(trace), "--waste", "0.03")["buckets"]) == 2


def test_given_buckets_are_judged_and_what_none_holds_is_rounded(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = document(capsys, "--trace", str(trace), "--buckets", "16384,60032")
    assert [request["bucket"] for request in printed["requests"]] == [63_296, 60_032, 16_384]
    rule = document(capsys, "--trace", str(trace), "--buckets", '{"from": 16000, "to": 65536, "waste": 0.06}')
    assert rule["buckets"][-1] == 65_536


def test_the_printed_yaml_is_a_setting(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["buckets", "--trace", str(trace), "--count", "2"]) == 0
    printed = capsys.readouterr().out
    assert "63296" in printed and "3.1%" in printed, "the table"
    pasted = yaml.safe_load(printed[printed.index("diffusion_compile_config") :])
    setting = read_config(pasted["diffusion_compile_config"]).pad_seq_buckets
    assert setting is not None and setting.rows == (16_384, 63_296)


def test_one_shape_alone_says_what_prompts_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["buckets", "--shape", "1344x768", "--seconds", "7"]) == 0
    printed = capsys.readouterr().out.split()
    assert "53000" in printed
    assert printed[printed.index("54080") + 1] == "1080"
    assert main(["buckets", "--shape", "1344x768", "--seconds", "7", "--buckets", "16384,54080"]) == 0
    assert "too short" in capsys.readouterr().out


def test_shapes_come_from_yaml_and_flags_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "shapes.yaml").write_text(yaml.safe_dump(LINES))
    flags = ("--shape", "1344x768", "--frames", "124", "--reference", "image:1024x768", "--prompt-rows", "9")
    printed = document(capsys, *flags, "--shapes", str(tmp_path / "shapes.yaml"), "--count", "9")
    assert [request["used_rows"] for request in printed["requests"]] == [37 * 1008 + 414 + 768 + 9, *USED]


def test_the_plot_is_a_picture(trace: Path, tmp_path: Path) -> None:
    assert main(["buckets", "--trace", str(trace), "--count", "2", "--plot", str(tmp_path / "plot.png")]) == 0
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "there are no requests; give --shape WxH"),
        (("--trace", "TRACE"), "say what is wanted of the buckets: --count K"),
        (("--trace", "TRACE", "--count", "0"), "count is 0, expected at least 1"),
        (("--trace", "TRACE", "--waste", "0.000001"), "waste is 1e-06, expected at least 0.0"),
        (("--shape", "1344"), "--shape is '1344', expected a size such as 1344x768"),
        (("--shape", "1344x768", "--seconds", "long"), "--seconds is 'long', expected a number of seconds"),
        (
            ("--shape", "1344x768", "--buckets", "100"),
            r"--buckets.pad_seq_buckets.lengths\[0\] is 100, expected a multi",
        ),
        (("--shape", "1344x768", "--buckets", "a,b"), "--buckets is 'a,b', expected numbers"),
        (("--shapes", "none.yaml", "--count", "1"), "--shapes none.yaml: .*No such file"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    arguments: tuple[str, ...], message: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["buckets", *(str(trace) if word == "TRACE" else word for word in arguments)]) == 2
    printed = capsys.readouterr().err
    assert re.search(message, printed) and printed.count("\n") == 1


_MEASURE = """
import pathlib, sys
from vllm_omni_diffusion_compile.commands.main import main
assert main(["buckets", "--trace", sys.argv[1], "--count", "8", "--json"]) == 0
# Not ru_maxrss, which is that of the process that started this one where that was larger.
status = dict(line.split(":", 1) for line in pathlib.Path("/proc/self/status").read_text().splitlines())
print(int(status["VmHWM"].split()[0]) // 1024, file=sys.stderr)
"""


def test_a_long_trace_takes_little_memory(tmp_path: Path) -> None:
    lines = [json.dumps(line | {"prompt_rows": rows}) for rows in range(20, 520) for line in LINES]
    (tmp_path / "long.jsonl").write_text(("\n".join(lines) + "\n") * 200)  # 300,000 lines
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(tmp_path / "long.jsonl")], check=True, capture_output=True, text=True
    )
    assert int(done.stderr) < 300  # MB; how long it takes is measured, and said in the documentation
    assert done.stdout.count("used_rows") == 300_000
