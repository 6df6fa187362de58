"""Compile events from the installed release's worker to its client and to Prometheus."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY
from vllm.v1.engine.exceptions import EngineDeadError
from vllm_omni.diffusion.data import DiffusionOutput, DiffusionRequestAbortedError
from vllm_omni.diffusion.diffusion_engine import DiffusionEngine
from vllm_omni.diffusion.distributed import parallel_state
from vllm_omni.diffusion.inline_stage_diffusion_client import InlineStageDiffusionClient
from vllm_omni.diffusion.ipc import pack_diffusion_output_shm, unpack_diffusion_output_shm
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.diffusion.stage_diffusion_client import StageDiffusionClient
from vllm_omni.diffusion.worker import diffusion_worker
from vllm_omni.diffusion.worker.diffusion_worker import DiffusionWorker
from vllm_omni.diffusion.worker.utils import BatchRunnerOutput, RunnerOutput
from vllm_omni.distributed.omni_connectors.utils.serialization import OmniMsgpackDecoder, OmniMsgpackEncoder
from vllm_omni.inputs.data import OmniDiffusionSamplingParams
from vllm_omni.metrics.prometheus import OmniPrometheusMetrics
from vllm_omni.outputs import OmniRequestOutput

from vllm_omni_diffusion_compile.compile.delivery import Cursor, Incoming, Outgoing
from vllm_omni_diffusion_compile.compile.events import LOG
from vllm_omni_diffusion_compile.upstream import fallbacks, metrics

pytestmark = pytest.mark.contract

MODEL = "org/model"
PREFIX = "vllm_omni:diffusion_compile_"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that has compiled nothing yet."""
    LOG.clear()
    LOG.rank = 0
    monkeypatch.setattr(metrics, "_outgoing", Outgoing(LOG))
    monkeypatch.setattr(metrics, "_unsaid", Cursor(LOG))
    monkeypatch.setattr(metrics, "_incoming", Incoming())
    monkeypatch.setattr(metrics, "_server", None)
    families = metrics.families()
    for family in (families.compilations, families.seconds, families.fallbacks, families.limits):
        family.clear()
    yield
    LOG.clear()
    LOG.rank = 0


def worker(run: Callable[[], Any], **config: Any) -> Any:
    """A real worker over a model runner that does `run`."""
    made = object.__new__(DiffusionWorker)
    made.rank = 0
    made.lora_manager = None
    made.profiler = None
    made._get_profiler = lambda: None
    made.od_config = SimpleNamespace(diffusion_compile_dynamic=False, **config)
    made.model_runner = SimpleNamespace(
        execute_model=lambda *_, **__: run(),
        execute_model_batch=lambda *_: run(),
        execute_stepwise=lambda *_: run(),
    )
    return made


def compiled(region: str = "Block", **details: Any) -> None:
    LOG.record("compilation", "transformer", region, shapes=("x: bfloat16[1, 64, 128]",), seconds=1.5, **details)


def picture() -> DiffusionOutput:
    return DiffusionOutput(output=torch.zeros(1, 3, 512, 512), stage_durations={"diffuse": 1.0})  # 3 MB: goes by shm


def request() -> OmniDiffusionRequest:
    return OmniDiffusionRequest(
        prompt={"prompt": "a cat"}, sampling_params=OmniDiffusionSamplingParams(), request_id="user-1"
    )


@pytest.fixture
def engine() -> Any:
    made = object.__new__(DiffusionEngine)
    made.od_config = SimpleNamespace(
        model_class_name="Flux2KleinPipeline", enable_cpu_offload=False, output_type="pil", enforce_eager=False
    )
    made.post_process_func = None
    return made


class _Client:
    """One client, inline or not, that has been sent the given outputs."""

    def __init__(self, cls: Any, *outputs: OmniRequestOutput) -> None:
        self.client: Any = object.__new__(cls)
        self.client.stage_id = 2
        self.client._engine_dead = False
        self.client._shutting_down = False
        self.client._proc_manager = None
        self.client._output_queue = asyncio.Queue()
        self.client._drain_responses = lambda: None
        for output in outputs:
            self.client._output_queue.put_nowait(output)

    def get(self) -> OmniRequestOutput | None:
        output: OmniRequestOutput | None = self.client.get_diffusion_output_nowait()
        return output


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"{PREFIX}{name}", {"model_name": MODEL, "stage": "2", **labels})


BLOCK = {"component": "transformer", "region": "Block", "kind": "compilation"}


def test_events_go_from_worker_to_metrics_through_the_hosts_own_packing(engine: Any) -> None:
    OmniPrometheusMetrics(model_name=MODEL, log_stats=True)

    def run() -> DiffusionOutput:
        compiled()
        return picture()

    output = worker(run).execute_model(request(), None)
    # worker process -> engine's process
    arrived = unpack_diffusion_output_shm(pickle.loads(pickle.dumps(pack_diffusion_output_shm(output))))
    assert isinstance(arrived, DiffusionOutput) and arrived.output.shape == (1, 3, 512, 512)
    (formatted,) = engine.postprocess_output(request(), arrived)
    assert len(formatted.metrics[metrics.EVENTS]) == 1
    # engine's process -> API server's process
    message = OmniMsgpackDecoder().decode(OmniMsgpackEncoder().encode({"type": "result", "output": formatted}))
    received = _Client(StageDiffusionClient, message["output"]).get()
    assert received is not None and metrics.EVENTS not in received.metrics and received.metrics["width"] is None
    assert value("compilations_total", **BLOCK, after_ready="false") == 1
    assert value("s_total", **BLOCK, after_ready="false") == 1.5


@pytest.mark.parametrize("client", [StageDiffusionClient, InlineStageDiffusionClient])
def test_a_request_that_compiled_nothing_changes_nothing(engine: Any, client: type) -> None:
    output = picture()
    before = dict(vars(output))
    assert worker(lambda: output).execute_model(request(), None) is output
    assert vars(output) == before
    (formatted,) = engine.postprocess_output(request(), output)
    assert metrics.EVENTS not in formatted.metrics
    assert _Client(client, formatted).get() is formatted
    assert _Client(client).get() is None


NOTHING_NEW = SimpleNamespace(finished_req_ids=[], scheduled_new_reqs=[], scheduled_request_ids=[])


@pytest.mark.parametrize("shape", ["batch", "step", "rank"])
def test_events_go_with_the_first_result_whatever_the_worker_answers(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = picture(), picture()

    def run() -> Any:
        compiled()
        if shape == "rank":
            return first
        none = [RunnerOutput(request_id="0", step_index=1)] if shape == "step" else []
        return BatchRunnerOutput.from_list(
            [*none, RunnerOutput(request_id="1", result=first), RunnerOutput(request_id="2", result=second)]
        )

    made = worker(run)
    made._step_lora_state = {}
    if shape == "batch":
        answer = made.execute_model_batch(NOTHING_NEW, None)
    elif shape == "step":
        answer = made.execute_stepwise(NOTHING_NEW)
    else:
        monkeypatch.setattr(parallel_state, "get_data_parallel_rank", lambda: 0)
        monkeypatch.setattr(diffusion_worker, "validate_new_request_data_identity", lambda _: None)
        answer = made.execute_model([SimpleNamespace(req=request(), diffusion_kv_metadata=None)], None)
        assert answer["dp_rank"] == 0
    arrived = unpack_diffusion_output_shm(pickle.loads(pickle.dumps(pack_diffusion_output_shm(answer))))
    if shape == "rank":
        assert hasattr(arrived["output"], metrics.EVENTS)
    else:
        assert [hasattr(output.result, metrics.EVENTS) for output in arrived.runner_outputs][-2:] == [True, False]


def test_a_step_that_finishes_nothing_leaves_the_events_to_the_next_one() -> None:
    outputs = iter([RunnerOutput(request_id="1"), RunnerOutput(request_id="1", result=picture(), finished=True)])
    made = worker(lambda: next(outputs))
    made._step_lora_state = {}
    compiled()
    assert made.execute_stepwise(NOTHING_NEW).result is None
    assert hasattr(made.execute_stepwise(NOTHING_NEW).result, metrics.EVENTS)


def test_what_a_failed_request_compiled_is_counted_at_once_inline_and_later_elsewhere(engine: Any) -> None:
    OmniPrometheusMetrics(model_name=MODEL)
    compiled()
    aborted = worker(lambda: DiffusionOutput(aborted=True)).execute_model(request(), None)
    with pytest.raises(DiffusionRequestAbortedError):
        engine.postprocess_output(request(), aborted)
    assert _Client(StageDiffusionClient).get() is None
    assert value("compilations_total", **BLOCK, after_ready="false") is None
    assert _Client(InlineStageDiffusionClient).get() is None
    assert value("compilations_total", **BLOCK, after_ready="false") == 1

    compiled()
    failed = worker(lambda: DiffusionOutput(error="no")).execute_model(request(), None)
    with pytest.raises(RuntimeError, match="no"):
        engine.postprocess_output(request(), failed)
    (formatted,) = engine.postprocess_output(request(), picture())
    _Client(StageDiffusionClient, formatted).get()
    assert value("compilations_total", **BLOCK, after_ready="false") == 2


def test_chunks_before_the_last_one_carry_nothing(engine: Any) -> None:
    # A client that does not stream drops them.
    compiled()
    chunk = DiffusionOutput(output=torch.zeros(1), finished=False)
    chunk = worker(lambda: chunk).execute_model(request(), None)
    (formatted,) = engine.postprocess_output(request(), chunk)
    assert metrics.EVENTS not in formatted.metrics
    (last,) = engine.postprocess_output(request(), picture())
    assert len(last.metrics[metrics.EVENTS]) == 1


def test_failures_and_limits_have_families_of_their_own() -> None:
    OmniPrometheusMetrics(model_name=MODEL)
    LOG.ready = True
    LOG.record("fallback", "vae", "decode", error="BackendCompilerFailed", reason="no compiler")
    LOG.record("set-up failed", "transformer", "Block", error="TypeError")
    LOG.record("recompile limit", "transformer", "Block")
    LOG.record("recompilation", "transformer", "Block", seconds=2.0, reason="size mismatch")
    metrics.count(2, [event.as_dict() for event in LOG.since()[0]])
    ready = {"after_ready": "true"}
    assert value("fallbacks_total", component="vae", region="decode", reason="BackendCompilerFailed", **ready) == 1
    assert value("fallbacks_total", component="transformer", region="Block", reason="TypeError", **ready) == 1
    assert value("recompile_limit_total", component="transformer", region="Block", **ready) == 1
    assert value("compilations_total", **(BLOCK | {"kind": "recompilation"}), **ready) == 1
    assert value("s_total", **(BLOCK | {"kind": "recompilation"}), **ready) == 2


def test_a_failure_on_another_rank_is_counted_by_its_exception() -> None:
    OmniPrometheusMetrics(model_name=MODEL)
    fallbacks.latch("transformer", "Block", logging.getLogger("test")).close_for(1, "RuntimeError", "ptxas died")
    (event,) = LOG.since()[0]
    assert "rank 1" in event.reason and "ptxas died" in event.reason
    metrics.count(2, [event.as_dict()])
    labels = {"component": "transformer", "region": "Block", "reason": "RuntimeError", "after_ready": "false"}
    assert value("fallbacks_total", **labels) == 1


def test_nothing_is_counted_where_the_host_counts_nothing() -> None:
    compiled()
    events = [event.as_dict() for event in LOG.since()[0]]
    metrics.count(2, events)  # no metrics in this process
    OmniPrometheusMetrics(model_name=MODEL, log_stats=False)
    metrics.count(2, events)
    assert value("compilations_total", **BLOCK, after_ready="false") is None


def test_an_event_of_another_release_is_named_and_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    OmniPrometheusMetrics(model_name=MODEL)
    compiled()
    (event,) = (event.as_dict() for event in LOG.since()[0])
    metrics.count(2, [event | {"colour": "red"}, event])
    assert "another release" in caplog.text and "colour" in caplog.text
    assert value("compilations_total", **BLOCK, after_ready="false") == 1


def started(engine: Any, workers: list[Any]) -> None:
    """Start the engine with workers that answer an RPC as the executors do."""
    engine.executor = object()
    engine._dummy_run = lambda: None

    def rpc(method: str, **_: Any) -> list[Any]:
        return [getattr(made, method)() for made in workers[:1]]

    engine.collective_rpc = rpc
    engine.run_startup_warmup()


def test_the_start_is_summed_up_in_one_line_and_counted_before_any_request(
    engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    OmniPrometheusMetrics(model_name=MODEL)
    compiled()
    compiled("LastBlock")
    started(engine, [worker(picture)])
    (line,) = [text for text in caplog.messages if text.startswith("Compiled before the server is ready")]
    assert "2 compilation(s) in 3.0 s" in line and "transformer Block 1" in line
    assert LOG.ready
    _Client(InlineStageDiffusionClient).get()
    assert value("compilations_total", **BLOCK, after_ready="false") == 1
    # ... and not again by the first request.
    output = worker(picture).execute_model(request(), None)
    assert not hasattr(output, metrics.EVENTS)


def test_of_other_ranks_only_failures_are_counted(
    engine: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled()
    LOG.record("fallback", "vae", "decode", error="RuntimeError")
    parcel = Outgoing(LOG).everything()
    monkeypatch.setattr(metrics, "_of_all_ranks", lambda own: [own, {**parcel, "pid": own["pid"] + 1}])
    started(engine, [worker(picture)])
    (line,) = [text for text in caplog.messages if text.startswith("Compiled before the server is ready")]
    assert "1 compilation(s)" in line
    assert [event["kind"] for event in metrics._incoming.drain()] == ["compilation", "fallback", "fallback"]


def test_nothing_compiled_says_nothing(engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    started(engine, [worker(picture)])
    assert "Compiled before" not in caplog.text


def test_an_eager_engine_asks_nobody(engine: Any) -> None:
    engine.od_config.enforce_eager = True
    started(engine, [])
    assert not LOG.ready


@pytest.mark.parametrize("answer", [TimeoutError("hung"), [], [None], ["what?"], None])
def test_workers_that_cannot_be_told_do_not_fail_the_start(
    engine: Any, caplog: pytest.LogCaptureFixture, answer: Any
) -> None:
    def rpc(method: str, **_: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    engine.executor = object()
    engine._dummy_run = lambda: None
    engine.collective_rpc = rpc
    engine.run_startup_warmup()
    assert "could not be told" in caplog.text


def test_a_dead_engine_still_fails_the_start(engine: Any) -> None:
    def rpc(method: str, **_: Any) -> Any:
        raise EngineDeadError

    engine.executor = object()
    engine._dummy_run = lambda: None
    engine.collective_rpc = rpc
    with pytest.raises(EngineDeadError):
        engine.run_startup_warmup()


def test_a_request_that_waited_is_warned_of_once_also_when_it_failed(caplog: pytest.LogCaptureFixture) -> None:
    def run() -> DiffusionOutput:
        if not LOG.since()[0]:
            LOG.record(
                "recompilation", "transformer", "Block", seconds=11.5, shapes=("x: bfloat16[1, 64, 128]",),
                reason="tensor 'x' size mismatch at index 1. expected 64, actual 96",
            )  # fmt: skip
            raise MemoryError
        return picture()

    made = worker(run)
    made.diffusion_compile_ready()
    with pytest.raises(MemoryError):
        made.execute_model(request(), None)
    made.execute_model(request(), None)
    (line,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    for part in (
        "11.5 s",
        "transformer Block",
        "bfloat16[1, 64, 128]",
        "size mismatch",
        "--no-diffusion-compile-dynam",
    ):
        assert part in line.getMessage()


def test_what_was_set_up_and_is_never_called_is_named_once_the_server_is_ready(
    caplog: pytest.LogCaptureFixture,
) -> None:
    latch = fallbacks.latch("model", "GemmaDecoderLayer", logging.getLogger("vllm.test"))
    asleep, made = worker(picture), worker(picture)
    asleep.diffusion_compile_ready()
    assert "GemmaDecoderLayer" not in caplog.text, "nothing has been asked of the model yet"
    made.execute_model(request(), None)
    made.diffusion_compile_ready()
    (line,) = [record.getMessage() for record in caplog.records if latch.name in record.getMessage()]
    assert "not compiled by any request so far" in line


def test_what_was_compiled_before_ready_warns_nobody(caplog: pytest.LogCaptureFixture) -> None:
    compiled()
    worker(picture).execute_model(request(), None)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_region_that_reaches_the_recompile_limit_in_warmup_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def run() -> DiffusionOutput:
        for region in ("Block", "Block", "SingleBlock"):  # a block whose graph breaks has several pieces of code
            LOG.record("recompile limit", "transformer", region, shapes=("x: bfloat16[1, 64, 128]",))
        return picture()

    made = worker(run)
    made.execute_model(request(), None)
    made.execute_model(request(), None)
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [line.partition(" reached torch's recompile limit at x: bfloat16[1, 64, 128]")[0] for line in lines] == [
        "transformer Block",
        "transformer SingleBlock",
    ]
    assert all("Raise recompile_limit" in line and "user" not in line for line in lines)


def test_the_other_ranks_do_not_repeat_the_warning(caplog: pytest.LogCaptureFixture) -> None:
    made = worker(picture)
    made.rank = 1
    made.diffusion_compile_ready()
    compiled()
    made.execute_model(request(), None)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert "A request waited" in caplog.text
