"""MiniMax-H3 padded to other lengths: the same output, and as many compiled shapes as buckets."""

from __future__ import annotations

import json
import logging
import multiprocessing
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.compose.engine import H3_FRAMES, MARKS, Engine, assert_same, film

pytestmark = MARKS

# 32 latent frames of 4 rows, 178 steps of sound on two channels; the tiny tokenizer makes a row of each byte.
VIDEO_ROWS = 32 * 4 + 2 * 178
FULL = 512
# With it the request fills 512 rows: the release pads it with none.
PROMPT = "x" * (FULL - VIDEO_ROWS)
PINS = (576, 1024, 2048)
MODEL = "vllm_omni.diffusion.models.minimax_h3.minimax_h3_transformer"


def request(engine: Engine, *, prompt: str = PROMPT, steps: int = 1, **extra: Any) -> Any:
    return engine.request(prompt=prompt, **film(steps=steps, extra_args={"aspect_ratio": "1:1", **extra}))


def predicted(engine: Engine, **extra: Any) -> torch.Tensor:
    """What the transformer makes of the rows of video and sound."""
    found: list[torch.Tensor] = []

    def keep(_: torch.nn.Module, inputs: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        found.append(torch.cat([rows.float().flatten() for rows in output]))

    hook = engine.pipeline.transformer.register_forward_hook(keep)
    try:
        answer = engine.host.add_req_and_wait_for_response(request(engine, **extra))
    finally:
        hook.remove()
    assert answer.error is None, answer.error
    (rows,) = found
    return rows


def test_padding_changes_nothing(h3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(h3, compiled=False) as engine:
        bf16 = {pin: predicted(engine, **({"pad_seq_len": pin} if pin else {})) for pin in (None, *PINS)}
        # The model casts to bf16 by a constant of its module.
        monkeypatch.setattr(f"{MODEL}._BF16_DTYPE", torch.float32)
        engine.pipeline.transformer.float()
        fp32 = {pin: predicted(engine, **({"pad_seq_len": pin} if pin else {})) for pin in (None, *PINS)}
    true = fp32[None]
    assert true.dtype == torch.float32 and float(true.std()) > 0
    error = {pin: float((rows - true).norm() / true.norm()) for pin, rows in bf16.items()}
    assert 0 < error[None] < 0.1, "not two precisions of one model"
    for pin in PINS:
        torch.testing.assert_close(fp32[pin], true, rtol=1e-5, atol=1e-5 * float(true.abs().max()))
        assert error[pin] <= error[None] * 1.02, error


def test_a_server_compiles_its_buckets_and_nothing_more(h3: Path) -> None:
    config = {"backend": "eager", "pad_seq_buckets": [640, 1024]}
    options: dict[str, Any] = {"diffusion_compile_dynamic": False}
    with Engine(h3, compiled=True, diffusion_compile_config=config, **options) as engine:
        warm = engine.graphs
        assert warm > 0, "nothing was warmed up"

        def ask(length: int) -> None:
            answer = engine.host.add_req_and_wait_for_response(request(engine, prompt="y" * length, steps=3))
            assert answer.error is None

        # The server answers in another thread than the one that it was loaded in, as the warmup did.
        with ThreadPoolExecutor(1) as service:
            for length in range(1, 500, 60):
                service.submit(ask, length).result()
        ask(31)
        assert engine.graphs == warm, "compiled more for a prompt length"
    with Engine(h3, compiled=True, diffusion_compile_config={"backend": "eager"}, **options) as engine:
        seen = []
        for length in (1, 61):
            engine.host.add_req_and_wait_for_response(request(engine, prompt="y" * length))
            seen.append(engine.graphs)
        assert seen[1] > seen[0] > 0, "each length is compiled by itself without buckets"


def test_steps_are_padded_and_refused_too(h3: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    config = {"pad_seq_buckets": {"lengths": [640, 1024], "over": "reject"}}
    with Engine(h3, compiled=False, step_execution=True, max_num_seqs=2, diffusion_compile_config=config) as engine:
        several = [request(engine), request(engine, pad_seq_len=1024), request(engine, prompt="y" * 200)]
        answers = engine.together(several)
        assert len(answers) == 3 and all(answer is not None for answer in answers)
        said = caplog.text
        for line in ("pad_seq_len=640 used=512 seq_len=640", "pad_seq_len=1024 used=512", "pad_seq_len=1024 used=684"):
            assert f"MiniMax H3 packed sequence: task=t2va {line}" in said
        with pytest.raises(RuntimeError, match=r"pad_seq_len is 512, expected at least 576: .* has 513 rows"):
            engine.together([request(engine, prompt=f"{PROMPT}x", pad_seq_len=FULL)])
        with pytest.raises(RuntimeError, match="needs 1084 rows, expected at most 1024"):
            engine.together([request(engine, prompt="y" * 600)])


def test_what_no_bucket_holds_is_rounded_with_one_warning(h3: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Engine(h3, compiled=False, diffusion_compile_config={"pad_seq_buckets": [64, 512]}) as engine:
        for _ in range(2):
            assert engine.host.add_req_and_wait_for_response(request(engine, prompt=f"{PROMPT}x")).error is None
    (said,) = [line for line in caplog.messages if "longer than every bucket" in line]
    assert said.startswith("A request of 513 rows") and "(the longest is 512) and was padded to 576" in said


@pytest.fixture
def two_heads(h3: Path, tmp_path: Path) -> Path:
    """The tiny checkpoint with two heads of half the width, which two ranks can share."""
    model = tmp_path / "FL2VA"
    shutil.copytree(h3, model)
    transformer = model / "transformer"
    config = json.loads((transformer / "config.json").read_text())
    config |= {"num_attention_heads": 2, "attention_head_dim": 64, "rope_inv_freq_len": 8}
    (transformer / "config.json").write_text(json.dumps(config))
    weights = load_file(transformer / "diffusion_pytorch_model.safetensors")
    for name, tensor in weights.items():
        if name.endswith(("q_norm.weight", "k_norm.weight", "rope.inv_freq")):
            weights[name] = tensor[: tensor.numel() // 2].contiguous()
    save_file(weights, transformer / "diffusion_pytorch_model.safetensors")
    return model


@pytest.mark.slow
def test_ranks_that_share_a_sequence_make_of_it_what_one_does(two_heads: Path) -> None:
    rows: dict[int | None, torch.Tensor] = {}
    with Engine(two_heads, compiled=False) as engine:
        alone = engine.film(prompt=PROMPT, steps=3)
    method = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    try:
        config = {"pad_seq_buckets": [FULL, 1024]}
        with Engine(
            two_heads, compiled=False, parallel_config={"ulysses_degree": 2}, diffusion_compile_config=config
        ) as engine:
            shared = [
                engine.film(prompt=PROMPT, steps=3, extra_args={"aspect_ratio": "1:1", **extra})
                for extra in ({}, {"pad_seq_len": 1024}, {"pad_seq_len": 2048})
            ]
            answer = engine.host.add_req_and_wait_for_response(request(engine, prompt=f"{PROMPT}x", pad_seq_len=FULL))
        extension = {"worker_extension_cls": "tests.compose.ranks.PredictedRows"}
        with Engine(two_heads, compiled=False, parallel_config={"ulysses_degree": 2}, **extension) as engine:
            engine.host.collective_rpc("compute_in_fp32", timeout=60)
            for pin in (None, *PINS):
                pinned: dict[str, Any] = {} if pin is None else {"pad_seq_len": pin}
                assert engine.host.add_req_and_wait_for_response(request(engine, **pinned)).error is None
                rows[pin] = torch.tensor(engine.host.collective_rpc("last_rows", timeout=60)[0])
    finally:
        multiprocessing.set_start_method(method, force=True)
    true = rows[None]
    assert float(true.std()) > 0
    for pin in PINS:
        torch.testing.assert_close(rows[pin], true, rtol=1e-5, atol=1e-5 * float(true.abs().max()))
    assert_same(shared, [alone] * len(shared))
    assert answer.error_status_code == 400 and "pad_seq_len is 512, expected at least 576" in answer.error


def test_frames_of_this_module() -> None:
    assert H3_FRAMES == 107, "VIDEO_ROWS is for so many"
