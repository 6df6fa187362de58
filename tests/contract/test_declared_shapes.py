"""Warmup of declared shapes with the installed engine: which requests, what is reported, and what ends the start."""

from __future__ import annotations

import io
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from vllm.v1.engine.exceptions import EngineDeadError
from vllm_omni.diffusion import diffusion_engine
from vllm_omni.diffusion.data import DiffusionOutput, OmniDiffusionConfig
from vllm_omni.diffusion.diffusion_engine import DiffusionEngine
from vllm_omni.diffusion.executor.uniproc_executor import UniProcDiffusionExecutor
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.entrypoints.openai.utils import parse_lora_request

from vllm_omni_diffusion_compile.compile.events import LOG, CompileEvent
from vllm_omni_diffusion_compile.errors import SettingError, WarmupError
from vllm_omni_diffusion_compile.upstream import metrics, reporting
from vllm_omni_diffusion_compile.warmup.report import ROUTE, write

pytestmark = pytest.mark.contract

Respond = Callable[[OmniDiffusionRequest], DiffusionOutput | None]


class Workers:
    """One worker, whose requests take a moment and compile two graphs at every size that is new to it."""

    def __init__(self) -> None:
        self.known: set[tuple[int, int]] = set()
        self.graphs = 0
        self.executions: list[tuple[float, float]] = []
        self.ready: list[float] = []
        self.loaded: list[Any] = []
        self.eager: list[str] = []

    def run(self, request: OmniDiffusionRequest) -> None:
        began = time.time()
        size = (request.sampling_params.width, request.sampling_params.height)
        if size not in self.known:
            self.known.add(size)
            self.graphs += 2
        time.sleep(0.01)
        self.executions.append((began, time.time()))

    def rpc(self, method: str, *, args: tuple[Any, ...] = (), **_: Any) -> list[Any]:
        if method == "diffusion_compile_usage":
            executions, self.executions = self.executions, []
            events = {"graphs": self.graphs, "events": self.graphs, "compile_s": 0.001 * self.graphs}
            return [events | {"executions": executions, "eager": []}, events | {"executions": [], "eager": self.eager}]
        if method == "diffusion_compile_prompt":
            rows, prompt = args
            return [(f"{rows} words", rows - 1)] if rows else [(prompt, 12)]
        if method == "add_lora":
            if not Path(args[0].lora_path).exists():
                raise ValueError("no adapter_config.json")
            self.loaded.append(args[0])
            return [True]
        if method == "list_loras":  # of a server that keeps one
            return [[adapter.lora_int_id for adapter in self.loaded[-1:]]]
        if method == "diffusion_compile_ready":
            self.ready.append(time.monotonic())
            return [[{"pid": 0, "first": 0, "events": []}]]
        return [{"generic": True, "graphs": self.graphs, "decodes": 0, "decode_graphs": 0}]


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Builds an engine of a model without a dummy run, which records requests and answers them."""
    monkeypatch.setattr(diffusion_engine, "supports_multimodal_input", lambda config: (True, False))
    monkeypatch.setattr(diffusion_engine, "get_dummy_run_num_frames", lambda name, audio: 0)
    release = threading.Event()

    def make(warmup: dict[str, Any], respond: Respond = lambda request: None, **config: Any) -> Any:
        engine = object.__new__(DiffusionEngine)
        engine.od_config = SimpleNamespace(
            model="MODEL",
            model_class_name="MiniMaxH3Pipeline",
            enforce_eager=False,
            diffusion_compile_vae=True,
            diffusion_compile_config={"warmup": warmup},
        )
        vars(engine.od_config).update(config)
        engine.requests = []
        engine.workers = Workers()
        engine.executor = SimpleNamespace(shutdown=lambda: setattr(engine, "closed", "executor"))
        engine.collective_rpc = engine.workers.rpc
        engine.abort_queue = SimpleNamespace(put=lambda name: setattr(engine, "aborted", name))
        engine.closed = False
        engine.close = lambda: setattr(engine, "closed", True)
        engine.release = release

        def add(request: OmniDiffusionRequest) -> DiffusionOutput:
            engine.requests.append(request)
            answer = respond(request)
            if answer is not None:
                return answer
            engine.workers.run(request)
            return DiffusionOutput(peak_memory_mb=512.0, stage_durations={"vae.decode": 0.25})

        engine.add_req_and_wait_for_response = add
        return engine

    yield make
    release.set()


def sizes(engine: Any) -> list[tuple[int, int]]:
    return [(request.sampling_params.width, request.sampling_params.height) for request in engine.requests]


def test_without_shapes_nothing_is_sent(build: Callable[..., Any]) -> None:
    engine = build({})
    engine.run_startup_warmup()
    assert engine.requests == []
    assert not hasattr(engine, reporting._REPORT)


def test_a_model_without_a_dummy_run_is_warmed_at_declared_shapes(build: Callable[..., Any]) -> None:
    engine = build({"shapes": ["64x64x107", "128x96"]})
    engine.run_startup_warmup()
    assert sizes(engine) == [(64, 64), (64, 64), (128, 96), (128, 96)]
    first, *_ = engine.requests
    assert not first.is_dummy_run()
    assert (first.sampling_params.num_frames, first.sampling_params.num_inference_steps) == (107, 2)
    assert first.sampling_params.need_kv_receive is False
    # Guidance that is not mentioned is the model's own, as in a request that does not mention it.
    assert first.sampling_params.guidance_scale_provided is False
    assert "multi_modal_data" not in first.prompt
    # MiniMax-H3 refuses a request for text to video without one.
    assert first.sampling_params.extra_args == {"aspect_ratio": "16:9"}


def test_a_shape_is_a_request_with_all_that_it_says(build: Callable[..., Any]) -> None:
    shape: dict[str, Any] = {
        "width": 64,
        "height": 32,
        "steps": 5,
        "guidance_scale": 4.0,
        "true_cfg_scale": 2.0,
        "prompt_rows": 40,
    }
    shape |= {"negative_prompt": "dull", "images": ["320x256", "64x32"]}
    shape |= {"extra_args": {"task": "fl2va", "aspect_ratio": "1:1"}}
    engine = build({"shapes": [shape]})
    engine.run_startup_warmup()
    request = engine.requests[0]
    params = request.sampling_params
    assert (params.num_inference_steps, params.guidance_scale, params.guidance_scale_provided) == (5, 4.0, True)
    assert params.true_cfg_scale == 2.0
    assert params.do_classifier_free_guidance is True
    assert params.extra_args == {"task": "fl2va", "aspect_ratio": "1:1"}
    assert (request.prompt["prompt"], request.prompt["negative_prompt"]) == ("40 words", "dull")
    assert [picture.size for picture in request.prompt["multi_modal_data"]["image"]] == [(320, 256), (64, 32)]


def test_one_input_picture_is_not_a_list(build: Callable[..., Any]) -> None:
    engine = build({"shapes": [{"width": 64, "height": 32, "images": 1}]})
    engine.run_startup_warmup()
    assert engine.requests[0].prompt["multi_modal_data"]["image"].size == (64, 32)


def test_an_adapter_is_there_before_anything_is_compiled_and_its_request_names_it(
    build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What vLLM-Omni's own dummy run compiles is for layers that the adapter would replace."""
    loaded_by_then: list[int] = []
    monkeypatch.setattr(diffusion_engine, "get_dummy_run_num_frames", lambda name, audio: 1)
    adapter = {"name": "style", "path": str(tmp_path), "scale": 0.5}
    shape = {"width": 64, "height": 32, "lora": adapter}
    engine: Any = build(
        {"shapes": [shape, {"width": 96, "height": 32, "lora": adapter | {"int_id": 7}}]},
        lambda _: loaded_by_then.append(len(engine.workers.loaded)),
        model_class_name="Flux2KleinPipeline",
    )
    engine.run_startup_warmup()
    assert set(loaded_by_then) == {2}
    assert engine.requests[0].is_dummy_run()
    ours = [request.sampling_params for request in engine.requests if not request.is_dummy_run()]
    named = [(params.lora_request and params.lora_request.lora_int_id, params.lora_scale) for params in ours]
    # As vLLM-Omni numbers the adapter of a request by HTTP, so that the user's finds it loaded.
    parsed, scale = parse_lora_request(adapter)
    assert parsed is not None
    number = parsed.lora_int_id
    assert list(dict.fromkeys(named)) == [(number, scale), (None, 1.0), (7, 0.5)]
    assert (ours[0].lora_request.lora_name, ours[0].lora_request.lora_path) == ("style", str(tmp_path))
    # Users' requests without it are as warm as those with it.
    shapes = [(params.width, params.lora_request is not None) for params in ours]
    assert list(dict.fromkeys(shapes)) == [(64, True), (64, False), (96, True), (96, False)]


def test_an_adapter_that_cannot_be_loaded_costs_its_shape_alone(
    build: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    shapes = [{"width": 64, "height": 64, "lora": {"name": "style", "path": "nobody/style"}}, "96x64"]
    engine = build({"shapes": shapes})
    engine.run_startup_warmup()
    assert all(request.sampling_params.lora_request is None for request in engine.requests)
    assert set(sizes(engine)) == {(64, 64), (96, 64)}
    reason = "the adapter could not be loaded (ValueError: no adapter_config.json)"
    assert f"Warmup of 64x64 (lora=style): failed ({reason})" in caplog.text

    engine = build({"shapes": shapes, "on_failure": "fail"})
    with pytest.raises(WarmupError, match=r"64x64 \(lora=style\) failed: the adapter could not be loaded"):
        engine.run_startup_warmup()
    assert engine.closed is True


def test_a_server_that_ignores_adapters_is_not_called_warm_for_one(build: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    shapes = [{"width": 64, "height": 64, "lora": {"path": str(tmp_path)}}]
    engine = build({"shapes": shapes, "report_path": str(path)})
    rpc = engine.collective_rpc
    # A worker without a manager of adapters.
    answers = {"add_lora": [False], "list_loras": [[]]}
    engine.collective_rpc = lambda method, **more: answers[method] if method in answers else rpc(method, **more)
    engine.run_startup_warmup()
    adapted, plain = json.loads(path.read_text())["shapes"]
    assert (adapted["state"], plain["state"]) == ("failed", "warm")
    assert "takes no adapters from requests" in adapted["reason"]
    assert adapted["shape"] == shapes[0]


def test_a_dead_engine_is_not_swallowed_while_adapters_are_loaded(build: Callable[..., Any], tmp_path: Path) -> None:
    engine = build({"shapes": [{"width": 64, "height": 64, "lora": {"path": str(tmp_path)}}]})

    rpc = engine.collective_rpc

    def dying(method: str, **more: Any) -> Any:
        if method == "add_lora":
            raise EngineDeadError
        return rpc(method, **more)

    engine.collective_rpc = dying
    with pytest.raises(EngineDeadError):
        engine.run_startup_warmup()


@pytest.mark.parametrize(
    ("path", "backend", "message"),
    [
        ("/nowhere/style", "peft", "lora.path is '/nowhere/style', where there is nothing"),
        ("./style", "peft", "lora.path is './style', where there is nothing"),
        ("nobody/style", "distill", "lora names an adapter, but lora_backend is 'distill'"),
        ("nobody/style", "peft", None),  # perhaps a repository
        (str(Path(__file__).parent), "peft", None),
    ],
)
def test_an_adapter_that_is_not_there_is_refused_before_weights_are_loaded(
    path: str, backend: str, message: str | None
) -> None:
    shapes = ["64x64", {"width": 64, "height": 64, "lora": {"path": path}}]
    options: dict[str, Any] = {"model": "tiny", "master_port": 29511, "lora_backend": backend}
    options["diffusion_compile_config"] = {"warmup": {"shapes": shapes}}
    if message is None:
        OmniDiffusionConfig(**options)
        return
    with pytest.raises(SettingError) as error:
        OmniDiffusionConfig(**options)
    assert f"diffusion_compile_config.warmup.shapes[1].{message}" in str(error.value)


def test_requests_come_from_a_thread_that_is_as_new_as_the_engines_own(build: Callable[..., Any]) -> None:
    seen: list[tuple[str, bool, bool]] = []

    def respond(_: OmniDiffusionRequest) -> None:
        seen.append((threading.current_thread().name, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))

    engine = build({"shapes": ["64x64"]}, respond)
    with torch.no_grad(), torch.autocast("cpu"):
        engine.run_startup_warmup()
    fresh: list[tuple[bool, bool]] = []
    thread = threading.Thread(target=lambda: fresh.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))))
    thread.start()
    thread.join()
    assert {(grad, autocast) for _, grad, autocast in seen} == set(fresh)
    assert all(name == "diffusion-compile-warmup" for name, *_ in seen)


def test_a_worker_in_this_process_serves_in_the_thread_that_it_was_warmed_in(build: Callable[..., Any]) -> None:
    executor = object.__new__(UniProcDiffusionExecutor)
    executor._closed = False
    executor.driver_worker = Mock(execute_method=lambda method: threading.get_ident())
    warmed: list[int] = []
    engine = build({"shapes": ["64x64"]}, lambda request: warmed.extend(executor.collective_rpc("execute_model")))
    engine.executor = executor
    engine.run_startup_warmup()
    assert len(warmed) == 2
    served: list[int] = []
    thread = threading.Thread(target=lambda: served.extend(executor.collective_rpc("execute_model")))
    thread.start()
    thread.join(timeout=10)
    assert {*warmed, *served} == {warmed[0]} and served
    assert warmed[0] != threading.get_ident()


def test_the_report_has_what_the_compiler_failed_for_on_any_worker(build: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    engine = build({"shapes": ["64x64"], "report_path": str(path)})
    engine.workers.eager = ["vae decode (InvalidCxxCompiler)"] * 2
    engine.run_startup_warmup()
    report = json.loads(path.read_text())
    assert report["shapes"][0]["state"] == "warm"
    assert report["eager"] == ["vae decode (InvalidCxxCompiler)"]


def test_the_report_has_where_the_time_went(build: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    engine = build({"shapes": ["64x64", {"width": 64, "height": 32, "prompt_rows": 40}], "report_path": str(path)})
    engine.run_startup_warmup()
    report = json.loads(path.read_text())
    assert report["model"] == "MODEL" and report["spent_s"] > 0
    first, second = report["shapes"]
    assert (first["state"], first["requests"], first["compile_events"]) == ("warm", 2, 2)
    assert first["peak_memory_mb"] == 512.0
    assert second["prompt_rows"] == 39  # what the tokenizer allowed
    for timing in (first["cold"], first["warm"]):
        parts = [timing[name] for name in ("preparation_s", "compile_s", "execution_s", "transport_s")]
        assert all(part is not None and part >= 0 for part in parts)
        assert sum(parts) == pytest.approx(timing["total_s"], abs=0.05)
        assert timing["stages"] == {"vae.decode": 0.25}
    assert first["warm"]["compile_s"] == 0


def test_the_output_is_made_ready_as_for_a_user_and_no_event_of_the_start_gets_lost(build: Callable[..., Any]) -> None:
    made: list[Any] = []

    def postprocess(pixels: torch.Tensor, **_: Any) -> torch.Tensor:
        made.append(pixels)
        return pixels

    output = DiffusionOutput(output=torch.zeros(1, 3, 8, 8))
    output.__dict__[metrics.EVENTS] = {"pid": -1, "first": 0, "events": []}
    engine = build({"shapes": ["64x64"]}, lambda request: output, enable_cpu_offload=False)
    engine.post_process_func = postprocess
    engine._post_process_accepts_sampling_params = True
    engine.run_startup_warmup()
    assert made and made[0] is output.output
    assert metrics.EVENTS in output.__dict__


def test_a_shape_that_runs_out_of_memory_is_said_and_the_server_starts(
    build: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    def respond(request: OmniDiffusionRequest) -> DiffusionOutput | None:
        if request.sampling_params.width == 4096:
            return DiffusionOutput(error="OutOfMemoryError: tried to allocate 80 GiB")
        if request.sampling_params.width == 32:
            raise RuntimeError("worker said no")
        return None

    engine = build({"shapes": ["4096x64", "32x64", "64x64"]}, respond)
    engine.run_startup_warmup()
    assert not engine.closed
    assert sizes(engine)[-1] == (64, 64)
    assert "4096x64: failed (OutOfMemoryError: tried to allocate 80 GiB)" in caplog.text
    assert "32x64: failed (RuntimeError: worker said no)" in caplog.text


def test_fail_ends_the_start_with_an_error_that_names_the_shape(build: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    engine = build(
        {"shapes": ["4096x64", "64x64"], "on_failure": "fail", "report_path": str(path)},
        lambda request: DiffusionOutput(error="no memory") if request.sampling_params.width == 4096 else None,
    )
    with pytest.raises(WarmupError, match="4096x64 failed: no memory.*warmup.on_failure"):
        engine.run_startup_warmup()
    assert engine.closed is True
    assert json.loads(path.read_text())["shapes"][0]["state"] == "failed"


def hang(engine_release: list[threading.Event]) -> Respond:
    def respond(request: OmniDiffusionRequest) -> None:
        if request.sampling_params.width == 128:
            engine_release[0].wait(30)

    return respond


def test_a_shape_that_hangs_does_not_hang_the_start(
    build: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    released: list[threading.Event] = []
    engine = build({"shapes": ["64x64", "128x64", "96x64"], "budget_s": 1.0}, hang(released))
    released.append(engine.release)
    start = time.monotonic()
    engine.run_startup_warmup()
    assert time.monotonic() - start < 5
    assert engine.aborted == engine.requests[-1].request_id
    assert "128x64: gave up" in caplog.text and "96x64: skipped" in caplog.text
    # A worker that is busy would not answer, so it is not asked; when it has come back, the server is ready for it.
    assert reporting.is_busy(engine) and engine.workers.ready == []
    engine.release.set()
    deadline = time.monotonic() + 5
    while not engine.workers.ready and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(engine.workers.ready) == 1 and not reporting.is_busy(engine)


def test_a_shape_that_hangs_ends_the_start_where_that_is_asked_for(build: Callable[..., Any]) -> None:
    released: list[threading.Event] = []
    engine = build({"shapes": ["128x64"], "budget_s": 0.3, "on_failure": "fail"}, hang(released))
    released.append(engine.release)
    with pytest.raises(WarmupError, match="128x64 gave up: it was still running when the budget of 0.3 s was spent"):
        engine.run_startup_warmup()
    # Closing the engine would wait for the request.
    assert engine.closed == "executor"


def test_a_dead_engine_is_not_swallowed(build: Callable[..., Any]) -> None:
    def respond(_: OmniDiffusionRequest) -> None:
        raise EngineDeadError

    with pytest.raises(EngineDeadError):
        build({"shapes": ["64x64"]}, respond).run_startup_warmup()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_class_name": "Pi0Pipeline"}, "observations"),
        ({"omni_kv_config": {"need_recv_cache": True}}, "upstream"),
        ({"enable_session_state_manager": True}, "session"),
    ],
)
def test_a_stage_that_answers_no_prompt_says_why(
    build: Callable[..., Any], caplog: pytest.LogCaptureFixture, config: dict[str, Any], reason: str
) -> None:
    engine = build({"shapes": ["64x64"]}, **config)
    engine.run_startup_warmup()
    assert engine.requests == []
    assert f"Declared shapes are not warmed: {config.get('model_class_name', 'the stage')}" in caplog.text
    assert reason in caplog.text


def test_without_compilation_there_is_nothing_to_warm(
    build: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    engine = build({"shapes": ["64x64"], "on_failure": "fail"}, enforce_eager=True)
    engine.run_startup_warmup()
    assert engine.requests == []
    assert "enforce_eager" in caplog.text
    report = reporting.latest()
    assert report is not None
    (shape,) = report["shapes"]
    assert (shape["name"], shape["state"], shape["reason"]) == (
        "64x64", "skipped", "compilation is off (enforce_eager)",
    )  # fmt: skip


@pytest.mark.parametrize("dynamic", [True, False])
def test_nothing_is_warmed_of_ours_that_nobody_declared(
    build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, dynamic: bool
) -> None:
    monkeypatch.setattr(diffusion_engine, "get_dummy_run_num_frames", lambda name, audio: 1)
    engine = build({"shapes": ["64x64"]}, model_class_name="Flux2KleinPipeline", diffusion_compile_dynamic=dynamic)
    engine.run_startup_warmup()
    ours = [size for size, request in zip(sizes(engine), engine.requests, strict=True) if not request.is_dummy_run()]
    assert ours == [(64, 64), (64, 64)]


def test_what_users_wait_for_is_added_to_the_report(build: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    engine = build({"shapes": ["64x64"], "report_path": str(path)})
    engine.run_startup_warmup()
    event = CompileEvent(
        kind="recompilation", component="transformer", region="Block", seconds=3.0, after_ready=True,
        request={"width": 96, "height": 96},
    )  # fmt: skip
    reporting.met(engine, [event, CompileEvent(kind="fallback", component="vae", region="decode", after_ready=True)])
    latest = reporting.latest()
    assert latest is not None
    (entry,) = latest["undeclared"]
    assert entry["shape"] == {"width": 96, "height": 96} and entry["compile_s"] == 3.0


def test_a_server_shows_its_report_or_says_why_it_has_none(
    build: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastapi import FastAPI
    from fastapi.testclient import TestClient
    from vllm_omni.entrypoints.openai import api_server

    monkeypatch.setattr(reporting, "_latest", None)
    app = FastAPI()
    app.include_router(api_server.router)
    client = TestClient(app)
    answer = client.get(ROUTE)
    assert answer.status_code == 404 and "no shape was declared" in answer.json()["error"]["message"]

    # A stage in another process wrote it.
    path = tmp_path / "report.json"
    write(path, {"version": 1, "shapes": []})
    app.state.args = SimpleNamespace(diffusion_compile_config={"warmup": {"report_path": str(path)}})
    assert client.get(ROUTE).json() == {"version": 1, "shapes": []}

    build({"shapes": ["64x64"]}).run_startup_warmup()
    assert client.get(ROUTE).json()["shapes"][0]["name"] == "64x64"
    # The host's own routes are all still there.
    assert "/v1/images/generations" in {getattr(route, "path", "") for route in app.routes}


def test_a_shape_without_a_size_is_a_request_that_states_none(build: Callable[..., Any]) -> None:
    engine = build({"shapes": [{"steps": 2}]})
    engine.run_startup_warmup()
    sent = engine.requests[0].sampling_params
    assert (sent.width, sent.height, sent.num_inference_steps) == (None, None, 2)
    report = reporting.latest()
    assert report is not None
    assert report["shapes"][0]["name"] == "the model's own size (steps=2)"


class Terminal(io.StringIO):
    """Somebody looks at it."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_shape_seconds_and_compile_events(
    build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    LOG.clear()

    def respond(asked: OmniDiffusionRequest) -> None:
        LOG.record("compilation", "transformer", "Block")
        time.sleep(0.6)  # the bar is drawn anew twice a second

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    engine = build({"shapes": ["64x64x107", "32x32"]}, respond)
    engine.run_startup_warmup()
    shown = terminal.getvalue()
    assert "64x64x107" in shown and "2/2" in shown and "1 compile events" in shown
    # The bar is instead of the lines, the table comes all the same.
    assert "Warming up with" not in caplog.text and "Declared shapes, warm in" in caplog.text
    LOG.clear()


@pytest.mark.parametrize(
    ("model", "dynamic", "warmed"),
    [
        ("/models/MiniMax-H3/FL2VA", True, [("t2va", 0, 1024), ("t2va", 0, 704)]),
        (
            "/models/MiniMax-H3/FL2VA", False,
            [("t2va", 0, 1024), ("fl2va", 1, 1024), ("t2va", 0, 704), ("fl2va", 1, 704)],
        ),
    ],
)  # fmt: skip
def test_each_bucket_is_warmed_where_no_shapes_are_declared(
    build: Callable[..., Any], model: str, dynamic: bool, warmed: list[tuple[str, int, int]]
) -> None:
    buckets = {"diffusion_compile_config": {"pad_seq_buckets": [704, 1024]}}
    engine = build({}, model=model, diffusion_compile_dynamic=dynamic, **buckets)
    engine.run_startup_warmup()
    asked = []
    for request in engine.requests:
        arguments = request.sampling_params.extra_args
        pictures = (request.prompt.get("multi_modal_data") or {}).get("image")
        asked.append((arguments["task"], 0 if pictures is None else 1, arguments["pad_seq_len"]))
    assert list(dict.fromkeys(asked)) == warmed


def test_declared_shapes_are_warmed_instead_of_buckets(build: Callable[..., Any]) -> None:
    config = {"pad_seq_buckets": [640, 1024], "warmup": {"shapes": ["128x64"]}}
    engine = build({}, diffusion_compile_config=config)
    engine.run_startup_warmup()
    assert set(sizes(engine)) == {(128, 64)}


def test_buckets_of_another_model_are_said_to_be_without_effect(
    build: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    config = {"pad_seq_buckets": [640, 1024]}
    engine = build({}, model_class_name="Flux2KleinPipeline", diffusion_compile_config=config)
    engine.run_startup_warmup()
    assert engine.requests == []
    assert "diffusion_compile_config.pad_seq_buckets has no effect: Flux2KleinPipeline" in caplog.text
