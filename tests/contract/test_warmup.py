"""Warmup through the ordinary request path of the installed engine."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from vllm.v1.engine.exceptions import EngineDeadError
from vllm_omni.diffusion import diffusion_engine
from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.diffusion_engine import DiffusionEngine
from vllm_omni.diffusion.request import OmniDiffusionRequest

pytestmark = pytest.mark.contract


class Workers:
    """Answers the facts RPC like workers whose decode compiles the given numbers of graphs, request by request."""

    def __init__(self, decode_graphs: list[int], generic: bool = True, decodes: int = 1) -> None:
        self.pending = decode_graphs
        self.facts = {"generic": generic, "graphs": 0, "decodes": decodes, "decode_graphs": 0}

    def run(self) -> None:
        graphs = self.pending.pop(0) if self.pending else 0
        self.facts = self.facts | {
            "graphs": self.facts["graphs"] + graphs,
            "decode_graphs": self.facts["decode_graphs"] + graphs,
        }

    def rpc(self, method: str, **_: Any) -> list[dict[str, Any]]:
        assert method == "diffusion_compile_facts"
        return [dict(self.facts)]


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Builds an engine as the upstream project's own tests do, which records requests and answers them."""
    monkeypatch.setattr(diffusion_engine, "supports_multimodal_input", lambda config: (True, False))
    monkeypatch.setattr(diffusion_engine, "get_dummy_run_num_frames", lambda name, audio: 1)

    def make(
        answer: Callable[[int, OmniDiffusionRequest], str | None] = lambda n, r: None,
        workers: Workers | None = None,
        **config: Any,
    ) -> Any:
        engine = object.__new__(DiffusionEngine)
        engine.od_config = SimpleNamespace(
            model_class_name="Flux2KleinPipeline", enforce_eager=False, diffusion_compile_vae=True, output_type="pil"
        )
        vars(engine.od_config).update(config)
        engine.requests = []

        def add(request: OmniDiffusionRequest) -> DiffusionOutput:
            engine.requests.append(request)
            if workers is not None:
                workers.run()
            return DiffusionOutput(error=answer(len(engine.requests), request))

        engine.add_req_and_wait_for_response = add
        engine.closed = False
        engine.close = lambda: setattr(engine, "closed", True)
        if workers is not None:
            engine.executor = object()
            engine.collective_rpc = workers.rpc
        return engine

    return make


def test_a_second_request_follows_the_dummy_run(build: Callable[..., Any]) -> None:
    engine = build()
    engine._dummy_run()
    dummy, real = engine.requests
    assert dummy.is_dummy_run() and not real.is_dummy_run()
    assert "multi_modal_data" in dummy.prompt and "multi_modal_data" not in real.prompt
    assert real.prompt["prompt"]
    params = real.sampling_params
    assert (params.width, params.height, params.num_inference_steps, params.num_frames) == (512, 512, 1, 1)
    assert params.need_kv_receive is False
    assert params.guidance_scale_provided is False


def test_a_video_model_is_asked_for_few_frames(build: Callable[..., Any]) -> None:
    engine = build(model_class_name="WanPipeline")
    engine._dummy_run()
    # One frame under an ordinary id would be the model's full length.
    assert engine.requests[1].sampling_params.num_frames == 9


def test_a_refused_single_step_is_tried_once_more_as_the_dummy_run_does(
    build: Callable[..., Any], release: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    engine = build(
        lambda n, request: "empty schedule" if request.sampling_params.num_inference_steps == 1 and n > 1 else None
    )
    engine._dummy_run()
    assert [request.sampling_params.num_inference_steps for request in engine.requests[1:]] == (
        [1, 2] if release >= (0, 30) else [1]
    )
    assert "real request-path warmup" in caplog.text and "serving will continue" in caplog.text


def test_an_exception_is_logged_and_serving_goes_on(
    build: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    def answer(n: int, request: OmniDiffusionRequest) -> str | None:
        if n > 1:
            raise RuntimeError("worker said no")
        return None

    engine = build(answer)
    engine.run_startup_warmup()
    assert not engine.closed
    assert "worker said no" in caplog.text and "serving will continue" in caplog.text


def test_a_configuration_without_the_setting_is_left_to_the_release(build: Callable[..., Any]) -> None:
    # The upstream project's own tests build engines whose configuration knows nothing of it.
    engine = build()
    del engine.od_config.diffusion_compile_vae
    engine._dummy_run()
    assert len(engine.requests) == 1


@pytest.mark.parametrize("answer", [TimeoutError("hung"), [{"another": "plugin"}], [None], object()])
def test_workers_that_cannot_be_asked_do_not_fail_the_start(build: Callable[..., Any], answer: Any) -> None:
    def rpc(method: str, **_: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    engine = build(workers=Workers([]))
    engine.collective_rpc = rpc
    engine.run_startup_warmup()
    assert len(engine.requests) == 2
    assert not engine.closed


def test_a_request_that_cannot_be_built_does_not_fail_the_start(
    build: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    engine = build()
    make = engine._make_dummy_request
    engine._make_dummy_request = Mock(side_effect=[make(height=512, width=512, guidance_scale=0.0), KeyError("gone")])
    engine.run_startup_warmup()
    assert len(engine.requests) == 1
    assert not engine.closed
    assert "serving will continue" in caplog.text


@pytest.mark.skipif(not hasattr(asyncio, "Runner"), reason="asyncio interrupts at once before Python 3.11")
def test_a_server_that_was_told_to_stop_warms_no_further(
    build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = build(workers=Workers([1, 1, 1, 1]))
    # What a process started in the background inherits may ignore SIGINT, and asyncio then does too.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    async def serve() -> None:
        # As asyncio.run does it: the first SIGINT cancels the main task, which is busy starting.
        os.kill(os.getpid(), signal.SIGINT)
        engine.run_startup_warmup()

    try:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(serve_then_yield(serve))
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(engine.requests) == 1
    assert "told to stop" in caplog.text and "serving will continue" not in caplog.text


async def serve_then_yield(serve: Callable[[], Any]) -> None:
    await serve()
    await asyncio.sleep(0)


def test_a_dead_engine_is_not_swallowed(build: Callable[..., Any]) -> None:
    def answer(n: int, request: OmniDiffusionRequest) -> str | None:
        if n > 1:
            raise EngineDeadError
        return None

    engine = build(answer)
    with pytest.raises(EngineDeadError):
        engine.run_startup_warmup()
    assert engine.closed


def test_a_failed_dummy_run_fails_as_before_and_nothing_follows(build: Callable[..., Any]) -> None:
    engine = build(lambda n, request: "no weights")
    with pytest.raises(RuntimeError, match="no weights"):
        engine.run_startup_warmup()
    assert engine.closed
    assert len(engine.requests) == 1


def test_sizes_go_on_until_decode_compiles_nothing(build: Callable[..., Any]) -> None:
    engine = build(workers=Workers([1, 0, 1, 0, 7]))  # dummy run, 512x512, second size, third size
    engine.run_startup_warmup()
    sizes = [(request.sampling_params.width, request.sampling_params.height) for request in engine.requests]
    assert sizes == [(512, 512), (512, 512), (768, 640), (640, 768)]
    assert all(not request.is_dummy_run() for request in engine.requests[1:])


def test_sizes_are_bounded_when_decode_never_stops_compiling(build: Callable[..., Any]) -> None:
    engine = build(workers=Workers([1] * 50))
    engine.run_startup_warmup()
    assert len(engine.requests) <= 6


@pytest.mark.parametrize("workers", [None, Workers([1], decodes=0)], ids=["cannot be asked", "nothing compiled"])
def test_no_further_size_without_a_reason(build: Callable[..., Any], workers: Workers | None) -> None:
    engine = build(workers=workers)
    engine.run_startup_warmup()
    assert len(engine.requests) == 2


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"enforce_eager": True}, "enforce_eager"),
        ({"diffusion_compile_vae": False}, "diffusion_compile_vae is off"),
        ({"model_class_name": "Pi0Pipeline"}, "observations"),
        ({"omni_kv_config": {"need_recv_cache": True}}, "upstream"),
        ({"stage_input_payload_keys": ("latents",)}, "upstream"),
        ({"kv_transfer_config": object()}, "upstream"),
        ({"enable_session_state_manager": True}, "session"),
    ],
)
def test_stages_that_get_none_say_why(
    build: Callable[..., Any], caplog: pytest.LogCaptureFixture, config: dict[str, Any], reason: str
) -> None:
    engine = build(workers=Workers([1, 1]), **config)
    engine.run_startup_warmup()
    assert len(engine.requests) == 1
    assert any("No real request-path warmup" in text and reason in text for text in caplog.messages)


@pytest.mark.parametrize(
    ("workers", "model"),
    [
        (Workers([1], generic=False), "Flux2KleinPipeline"),
        (None, "DreamZeroPipeline"),
        (None, "MingImageDiffusionPipeline"),
    ],
)
def test_a_pipeline_that_compiles_itself_gets_none(
    build: Callable[..., Any],
    workers: Workers | None,
    model: str,
    release: tuple[int, int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    from vllm_omni.diffusion.registry import DiffusionModelRegistry

    if DiffusionModelRegistry._try_load_model_cls(model) is None:
        pytest.skip(f"vLLM-Omni {release} has no {model}")
    engine = build(workers=workers, model_class_name=model)
    engine.run_startup_warmup()
    assert len(engine.requests) == 1
    assert "No real request-path warmup" in caplog.text


def test_a_model_without_a_dummy_run_gets_none(
    build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(diffusion_engine, "get_dummy_run_num_frames", lambda name, audio: 0)
    engine = build(model_class_name="MiniMaxH3Pipeline")
    engine.run_startup_warmup()
    assert engine.requests == []
    assert "takes no dummy run" in caplog.text


def test_distributed_offload_over_several_shards(build: Callable[..., Any], release: tuple[int, int]) -> None:
    config: dict[str, Any] = {
        "enable_distributed_layerwise_offload": True,
        "dlo_use_allgather": False,
        "parallel_config": SimpleNamespace(data_parallel_size=2, sequence_parallel_size=1),
    }
    if release >= (0, 30):
        config["diffusion_offload_config"] = None
    engine = build(**config)
    engine.run_startup_warmup()
    # One request hangs there in 0.28.0: the other shard waits in a collective.
    assert len(engine.requests) == (2 if release >= (0, 30) else 1)
