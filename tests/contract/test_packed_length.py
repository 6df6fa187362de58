"""Pins and buckets in the installed release: where requests come in, and where they are packed."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fastapi import HTTPException
from vllm_omni.diffusion.models.minimax_h3 import pipeline_minimax_h3 as host
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.omni import Omni
from vllm_omni.entrypoints.openai.protocol.videos import VideoGenerationRequest
from vllm_omni.entrypoints.openai.serving_video import OmniOpenAIServingVideo
from vllm_omni.errors import OmniClientError
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

from vllm_omni_diffusion_compile.errors import SettingError

pytestmark = pytest.mark.contract

FILM = {"width": 64, "height": 64, "num_frames": 107}
ROWS = 32 * 4 + 2 * 178
LATENTS: dict[str, Any] = {"text_len": 21, "latent_t": 32, "latent_h": 4, "latent_w": 4, "audio_t": 178}
T2VA = LATENTS | {"include_keyframe_cond": False}
FL2VA = LATENTS | {"include_keyframe_cond": True, "keyframe_frame_indices": [0, -1], "frame_count": 107}
REF2VA = LATENTS | {
    "ref_blocks": [{"kind": "image", "latent_h": 8, "latent_w": 4}, {"kind": "audio", "ref_audio_t": 80}]
}
USED = {"t2va": 21 + ROWS, "fl2va": 21 + ROWS + 8, "ref2va": 21 + ROWS + 8 + 160}


def config(**more: Any) -> SimpleNamespace:
    return SimpleNamespace(model_class_name="MiniMaxH3Pipeline", **more)


def bucketed(*lengths: int, over: str = "round", **more: Any) -> SimpleNamespace:
    buckets = {"lengths": list(lengths), "over": over}
    return config(diffusion_compile_config={"pad_seq_buckets": buckets}, **more)


def pack(od_config: Any, extra: dict[str, Any], task: str) -> dict[str, Any]:
    """Pack as the pipeline does within a request."""
    from vllm_omni_diffusion_compile.upstream import minimax_h3

    pipeline = SimpleNamespace()
    minimax_h3.read_buckets(lambda self, **_: None)(pipeline, od_config=od_config)
    request = SimpleNamespace(sampling_params=OmniDiffusionSamplingParams(**FILM, extra_args=extra))

    def forward(self: Any, request: Any) -> Any:
        # As 0.30.0 does with a pin; 0.28.0 knows none.
        native = {"seq_len": extra["pad_seq_len"]} if "pad_seq_len" in extra and _knows_pins() else {}
        if task == "ref2va":
            return host.minimax_h3_packed_sequence_ref2va_blocks(**REF2VA, **native)
        return host.minimax_h3_packed_sequence(**(FL2VA if task == "fl2va" else T2VA), **native)

    packed = minimax_h3.hold_for_request(forward)(pipeline, request)
    assert isinstance(packed, dict)
    return packed


def _knows_pins() -> bool:
    return "pad_seq_len" in inspect.signature(host.MiniMaxH3Pipeline.diffuse).parameters


@pytest.mark.parametrize("task", ["t2va", "fl2va", "ref2va"])
def test_a_request_is_padded_to_its_pin_or_the_shortest_bucket(task: str, caplog: pytest.LogCaptureFixture) -> None:
    used = USED[task]
    bucket = min(length for length in (576, 704) if length >= used)
    for od_config, extra, expected in (
        (config(), {"pad_seq_len": 1024}, 1024),
        (bucketed(704, 576), {}, bucket),
        (bucketed(704, 576), {"pad_seq_len": 1024}, 1024),
        (bucketed(64), {}, -(-used // 64) * 64),
    ):
        caplog.clear()
        packed = pack(od_config, extra, task)
        assert int(packed["seq_len"]) == expected
        assert packed["cu_seqlens"].tolist() == [0, used, expected]
        said = [line for line in caplog.messages if "packed sequence" in line]
        if od_config == bucketed(64):
            assert said == [f"MiniMax H3 packed sequence: task={task} pad_seq_len=None used={used} seq_len={expected}"]
        elif extra and _knows_pins():
            assert said == [], "the release says it itself, further out"
        else:
            line = f"MiniMax H3 packed sequence: task={task} pad_seq_len={expected} used={used} seq_len={expected}"
            assert said == [line]


@pytest.mark.parametrize("task", ["t2va", "fl2va", "ref2va"])
def test_padding_rows_are_what_the_release_puts_there(task: str) -> None:
    plain, padded = pack(config(), {}, task), pack(config(), {"pad_seq_len": 1024}, task)
    assert plain.keys() == padded.keys()
    more = 1024 - int(plain["seq_len"])
    for name, rows in plain.items():
        if name in ("seq_len", "cu_seqlens"):
            continue
        if not isinstance(rows, torch.Tensor) or rows.shape[:1] != (int(plain["seq_len"]),):
            assert torch.equal(rows, padded[name]) if isinstance(rows, torch.Tensor) else rows == padded[name]
            continue
        last = rows[-1:].expand(more, *rows.shape[1:])  # the release's own padding: each task has some
        assert torch.equal(padded[name], torch.cat([rows, last])), name
        assert padded[name].dtype == rows.dtype


def test_without_pin_and_buckets_the_packers_are_the_releases(caplog: pytest.LogCaptureFixture) -> None:
    for packer, arguments in ((host.minimax_h3_packed_sequence, T2VA), (host.minimax_h3_packed_sequence, FL2VA)):
        ours, theirs = packer(**arguments), inspect.unwrap(packer)(**arguments)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[k], v) for k, v in theirs.items() if isinstance(v, torch.Tensor))
    assert not caplog.messages


@pytest.mark.parametrize(
    ("od_config", "extra", "status", "message"),
    [
        (config(), {"pad_seq_len": 448}, 400, "pad_seq_len is 448, expected at least 512: .* has 505 rows"),
        (config(), {"pad_seq_len": True}, 400, r"pad_seq_len is True \(bool\)"),
        (config(), {"pad_seq_len": 2**21}, 413, "pad_seq_len is 2097152, expected at most"),
        (bucketed(64, 448, over="reject"), {}, 413, "needs 505 rows, expected at most 448, the longest"),
    ],
)
def test_what_the_worker_refuses_keeps_its_status(
    od_config: Any, extra: dict[str, Any], status: int, message: str
) -> None:
    from vllm_omni_diffusion_compile.upstream import minimax_h3

    def execute(self: Any) -> Any:
        return pack(od_config, extra, "t2va")

    output = minimax_h3.answer_refusals(execute)(None)
    assert output.error_status_code == status
    with pytest.raises(OmniClientError, match=message):
        raise OmniClientError(output.error)


def test_ranks_that_cannot_share_a_bucket_stop_the_start() -> None:
    parallel = SimpleNamespace(sequence_parallel_size=3, ulysses_mode="strict")
    with pytest.raises(
        SettingError, match="pad_seq_buckets has 640, which 3 ranks of sequence parallelism cannot share"
    ):
        host.MiniMaxH3Pipeline(od_config=bucketed(576, 640, parallel_config=parallel))


# --- where requests come in ------------------------------------------------------------------------------------------


class Served:
    """An engine, as the video handler of a server knows it."""

    def __init__(self) -> None:
        self.config = bucketed(1024, over="reject")

    def get_diffusion_od_config(self) -> SimpleNamespace:
        return self.config


@pytest.fixture
def served() -> Iterator[Served]:
    engine = Served()
    handler = OmniOpenAIServingVideo(engine, model_name="h3")
    yield engine
    if hasattr(handler, "shutdown"):
        handler.shutdown()


def test_a_video_request_is_checked_where_it_is_made(served: Served) -> None:
    film = {"prompt": "a cat", "size": "64x64", "seconds": "4"}
    assert VideoGenerationRequest(**film, extra_params={"pad_seq_len": 512}).extra_params == {"pad_seq_len": 512}
    for extra, status, message in (
        ({"pad_seq_len": "512"}, 400, "extra_params.pad_seq_len is '512' (str), expected a whole number"),
        ({"pad_seq_len": 448}, 400, f"expected at least 512: size and length of the video alone take {ROWS} rows"),
        ({"pad_seq_len": 2**20 + 64}, 413, "expected at most 1048576"),
        ({"duration": 10}, 413, "needs 1098 rows, expected at most 1024, the longest of this server's pad_seq_buckets"),
    ):
        with pytest.raises(HTTPException) as refused:
            VideoGenerationRequest(**film, extra_params=extra)
        assert refused.value.status_code == status and message in str(refused.value.detail)
    served.config = bucketed(1024, parallel_config=SimpleNamespace(sequence_parallel_size=3))
    with pytest.raises(HTTPException, match="pad_seq_len is 512, expected a multiple of 192: 3 ranks"):
        VideoGenerationRequest(**film, extra_params={"pad_seq_len": 512})
    served.config = SimpleNamespace(model_class_name="WanPipeline")
    assert VideoGenerationRequest(**film, extra_params={"pad_seq_len": "anything"})


def test_an_offline_request_is_checked_and_the_engine_stays_open() -> None:
    ran: list[Any] = []
    omni = object.__new__(Omni)
    omni.engine = SimpleNamespace(get_diffusion_od_config=config)
    omni.close = lambda: ran.append("closed")
    omni.resolve_sampling_params_list = lambda params: params

    def run_generation(*_: Any) -> list[Any]:
        ran.append("ran")
        return []

    omni._run_generation = run_generation
    good = OmniDiffusionSamplingParams(**FILM, extra_args={"pad_seq_len": 512})
    with pytest.raises(OmniClientError, match=r"extra_args.pad_seq_len is 512.0 \(float\)") as refused:
        omni.generate({"prompt": "a cat"}, OmniDiffusionSamplingParams(**FILM, extra_args={"pad_seq_len": 512.0}))
    assert refused.value.status_code == 400 and ran == []
    images = {"prompt": "a cat", "multi_modal_data": {"image": [object()] * 8}}
    with pytest.raises(OmniClientError, match=f"expected at least 576: .* alone take {ROWS + 32} rows"):
        omni.generate([images], good)
    omni.generate({"prompt": "a cat"}, good)
    assert ran == ["ran"]


def test_what_comes_in_by_another_way_is_checked_before_it_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    omni = object.__new__(AsyncOmni)
    monkeypatch.setattr(AsyncOmni, "get_diffusion_od_config", lambda self: config(), raising=False)
    params = OmniDiffusionSamplingParams(**FILM, extra_args={"pad_seq_len": 100})

    async def run(**more: Any) -> None:
        async for _ in omni.generate("a cat", **more):
            pass

    for more in ({"sampling_params": params}, {"sampling_params_list": [params]}):
        with pytest.raises(OmniClientError, match="pad_seq_len is 100, expected a multiple of 64, such as 64 or 128"):
            asyncio.run(run(**more))
