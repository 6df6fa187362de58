"""`vllm-omni-compile qualify` from end to end: a combination in a program and over HTTP, their oracle, and the rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.compose.engine import MARKS
from vllm_omni_diffusion_compile.evidence import file_digest, read_rows

pytestmark = MARKS


def test_combinations_are_compared_with_their_oracle_and_what_ran_is_recorded(klein: Path, tmp_path: Path) -> None:
    request = {"prompt": "a cat", "seed": 1, "width": 64, "height": 64, "num_inference_steps": 2}
    settings = {"diffusion_compile_vae": False, "diffusion_compile_config": {"backend": "eager"}}
    model = {"checkpoint": str(klein), "task": "text-to-image", "settings": settings, "request": request}
    combinations = [{"id": "klein", "model": "klein"}, {"id": "klein-http", "model": "klein", "api": "http"}]
    (tmp_path / "suite.yaml").write_text(json.dumps({"models": {"klein": model}, "combinations": combinations}))
    command = [
        sys.executable, "-m", "vllm_omni_diffusion_compile", "qualify", "--suite", str(tmp_path / "suite.yaml"),
        "--jobs", "2", "--out", str(tmp_path / "out"), "--evidence", str(tmp_path / "rows.jsonl"),
    ]  # fmt: skip
    ran = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    row, served = read_rows(tmp_path / "rows.jsonl")
    assert row.state == "validated" and row.trace is not None and row.provenance is not None

    # Two streams and two single ones, twice, through the compiler; each calls attention once.
    assert row.trace.compiled_calls >= 8
    assert row.trace.operators["aten::_scaled_dot_product_flash_attention_for_cpu"] == 8
    assert row.trace.attention == {"CpuSDPAImpl": 4}
    assert {figure.name for figure in row.figures} >= {
        "text_encoder", "transformer", "vae", "decoded by vae", "artefact 1",
        "transformer.hidden_states of call 1", "transformer.hidden_states of call 2",
    }  # fmt: skip
    noise = next(figure for figure in row.figures if figure.name == "transformer.hidden_states of call 1")
    assert noise.value == 0, "both start from the same noise"
    assert any("fp32" in figure.measure for figure in row.figures), "bf16 is held to a reference in fp32"

    assert (row.key.model, row.key.dtype, row.key.compiler) == ("Flux2KleinPipeline", "bfloat16", "eager")
    assert (row.key.shape, row.key.compile_scope, row.key.dynamic) == ("64x64", "regional", True)
    for name, sha256 in row.provenance.artefacts.items():
        assert file_digest(tmp_path / "out" / name) == sha256

    # The server computes the same, to the bit, and sends it as it is.
    assert served.state == "validated" and served.trace == row.trace
    assert [figure.value for figure in served.figures] == [figure.value for figure in row.figures]
    of_http = {"api_mode": "http", "output_transport": "PNG over HTTP"}
    assert served.key == row.key.model_copy(update=of_http)
    assert str(tmp_path) not in (tmp_path / "rows.jsonl").read_text(), "a row names no folder of this machine"
