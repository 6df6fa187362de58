"""`vllm-omni-compile bench` with real servers. What Dynamo traced runs as it is, so that a start takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# Detection and four starts: 216 s on two cores that others used, too.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TRACED = ("--", "--diffusion-compile-config", '{"backend": "eager"}')


@pytest.mark.parametrize("how", [[], ["--offline"]], ids=["server", "offline"])
def test_two_arms_of_a_real_model(how: list[str], klein: Path, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    bench = [sys.executable, "-m", "vllm_omni_diffusion_compile", "bench"]
    ran = subprocess.run(
        [
            *(*bench, str(klein), "--arm", "eager", "--arm", "regional-static", "--shape", "128x128", "--steps", "2"),
            *("--requests", "3", "--json", str(file), *how, *TRACED),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    assert "makes images: vLLM-Omni says so of Flux2KleinPipeline" in ran.stderr
    document = json.loads(file.read_text())
    eager, regional = (
        [start for start in document["starts"] if start["arm"] == arm["name"]] for arm in document["arms"]
    )
    assert not any(start["metrics"] for start in eager)
    for start in regional:
        counted = {
            after: sum(
                metric["value"]
                for metric in start["metrics"]
                if metric["name"].endswith("compilations_total") and metric["labels"]["after_ready"] == after
            )
            for after in ("false", "true")
        }
        # The shape was declared: compiled before ready, and never after.
        assert counted["false"] > 0 and counted["true"] == 0
        assert [shape["name"] for shape in start["report"]["shapes"]] == ["128x128"]
    assert all(sample["peak_memory_mb"] > 0 for start in document["starts"] for sample in start["samples"])
    again = subprocess.run([*bench, "--from", str(file)], capture_output=True, text=True, check=True)
    assert again.stdout == ran.stdout
    assert "a request to " in ran.stdout
