"""Warmup requests on the engine's ordinary path, after vLLM-Omni's own dummy run."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import uuid
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from vllm_omni_diffusion_compile.settings import VAE
from vllm_omni_diffusion_compile.warmup.plan import FIRST, Size
from vllm_omni_diffusion_compile.warmup.run import CompileFacts, Warmed, first_request, further_requests

_ENGINE = "vllm_omni.diffusion.diffusion_engine"
_PROMPT = "a photograph of a lighthouse at dusk, waves against the rocks, warm light in the windows"
# A worker answers in milliseconds; this only keeps a hung one from hanging the start-up.
_RPC_TIMEOUT_S = 60.0

# A video model takes one frame from a real request as "not stated" and makes its full length of it. Nine is the
# smallest count above one that temporal strides of 4 and of 8 both accept (4n+1, 8n+1).
_VIDEO_FRAMES = 9

# They answer an observation of a robot, not a prompt.
_ACTION_MODELS = frozenset(
    {"DreamZeroPipeline", "Gr00tN1d7Pipeline", "InternVLAA1Pipeline", "Pi0Pipeline", "Pi05Pipeline"}
)

# Engines whose first warmup request came back, with the number of denoise steps it took.
_warmed_steps: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def real_request_after_dummy_run(dummy_run: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(dummy_run)
    def _dummy_run(self: Any) -> None:
        dummy_run(self)
        reason = _why_not(self)
        if reason is not None:
            _logger().info("No real request-path warmup: %s.", reason)
            return
        for warmed in first_request(_sender(self), functools.partial(_facts, self), _dummy_steps(self)):
            _log(warmed)
            if warmed.error is None:
                _warmed_steps[self] = warmed.steps

    return _dummy_run


def further_sizes_after_warmup(run_startup_warmup: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(run_startup_warmup)
    def with_further_sizes(self: Any) -> None:
        run_startup_warmup(self)
        steps = _warmed_steps.pop(self, None)
        if steps is None:
            return
        for warmed in further_requests(_sender(self), functools.partial(_facts, self), steps):
            _log(warmed)

    return with_further_sizes


def _why_not(engine: Any) -> str | None:
    """Why this stage gets no warmup request; None if it gets one. The configuration first, then the workers."""
    config = engine.od_config
    if getattr(config, "enforce_eager", False):
        return "compilation is off (enforce_eager)"
    if not getattr(config, VAE, True):
        return f"{VAE} is off"
    if getattr(config, "model_class_name", None) in _ACTION_MODELS:
        return f"{config.model_class_name} acts on observations and cannot answer a prompt"
    if _waits_for_upstream(config):
        return "the stage waits for data of an upstream stage"
    if getattr(config, "enable_session_state_manager", False):
        return "the stage needs a session"
    if _one_request_hangs(config):
        return "a single request hangs with distributed layerwise offload over several shards in this release"
    if engine._make_dummy_request(height=FIRST.height, width=FIRST.width, guidance_scale=0.0) is None:
        return f"{config.model_class_name} takes no dummy run, so nothing is known of what it can be asked"
    answers = _ask_workers(engine)
    if answers and not all(answer["generic"] for answer in answers):
        return (
            "the model runner does not compile this pipeline "
            "(setup_compile() of its own, or no inductor on this platform)"
        )
    return None


def _waits_for_upstream(config: Any) -> bool:
    omni_kv = getattr(config, "omni_kv_config", None) or {}
    return bool(
        omni_kv.get("need_recv_cache")
        or getattr(config, "kv_transfer_config", None) is not None
        or getattr(config, "stage_input_payload_keys", ())
    )


def _one_request_hangs(config: Any) -> bool:
    """0.28.0 with distributed layerwise offload and more than one shard; 0.30.0 feeds every shard."""
    if hasattr(config, "diffusion_offload_config") or not getattr(
        config, "enable_distributed_layerwise_offload", False
    ):
        return False
    parallel = getattr(config, "parallel_config", None)
    shards = max(getattr(parallel, "data_parallel_size", 1) or 1, getattr(parallel, "sequence_parallel_size", 1) or 1)
    return shards > 1


def _sender(engine: Any) -> Callable[[Size, int], str | None]:
    from vllm.v1.engine.exceptions import EngineDeadError

    def send(size: Size, steps: int) -> str | None:
        try:
            output = engine.add_req_and_wait_for_response(_request(engine, size, steps))
        except EngineDeadError:
            raise  # nothing is left that could serve
        except Exception as error:  # noqa: BLE001 - warmup is best effort: the log says what failed, serving goes on
            return f"{type(error).__name__}: {error}"
        return str(output.error) if output.error else None

    return send


def _request(engine: Any, size: Size, steps: int) -> Any:
    """A request as a user would send it: text alone, an ordinary id, the model's own guidance, frames stated."""
    from vllm_omni.diffusion.request import OmniDiffusionRequest

    dummy = engine._make_dummy_request(height=size.height, width=size.width, guidance_scale=0.0)
    prompt = {key: value for key, value in dict(dummy.prompt).items() if key != "multi_modal_data"} | {
        "prompt": _PROMPT
    }
    sampling_params = dataclasses.replace(
        dummy.sampling_params,
        num_inference_steps=steps,
        num_frames=_frames(engine, dummy.sampling_params.num_frames),
        need_kv_receive=False,
        # The dummy run switches guidance off; None leaves it to the model, as in a request that does not mention it.
        guidance_scale=None,
        guidance_scale_provided=False,
        guidance_scale_2=None,
        extra_args={},
    )
    return OmniDiffusionRequest(prompt=prompt, request_id=f"warmup-{uuid.uuid4().hex}", sampling_params=sampling_params)


def _frames(engine: Any, dummy_frames: int) -> int:
    from vllm_omni.diffusion.io_support import get_diffusion_output_type

    if dummy_frames == 1 and get_diffusion_output_type(engine.od_config.model_class_name) == "video":
        return _VIDEO_FRAMES
    return dummy_frames


def _dummy_steps(engine: Any) -> int:
    """Denoise steps of the release's dummy run: 0.30.0 states two, 0.28.0 always takes one."""
    return 2 if "num_inference_steps" in inspect.signature(engine._make_dummy_request).parameters else 1


def _facts(engine: Any) -> CompileFacts | None:
    answers = _ask_workers(engine)
    if not answers:
        return None
    return CompileFacts(
        graphs=sum(answer["graphs"] for answer in answers),
        decodes=sum(answer["decodes"] for answer in answers),
        decode_graphs=sum(answer["decode_graphs"] for answer in answers),
    )


def _ask_workers(engine: Any) -> list[dict[str, Any]]:
    if getattr(engine, "executor", None) is None:  # an engine that has no workers yet
        return []
    answers = engine.collective_rpc("diffusion_compile_facts", timeout=_RPC_TIMEOUT_S)
    return [answer for answer in (answers if isinstance(answers, list) else [answers]) if isinstance(answer, dict)]


def _log(warmed: Warmed) -> None:
    if warmed.error is not None:
        _logger().warning(
            "real request-path warmup at %s with %d denoise step(s) failed after %.1f s: %s; serving will continue",
            warmed.size, warmed.steps, warmed.seconds, warmed.error,
        )  # fmt: skip
    elif warmed.graphs is None:
        _logger().info("real request-path warmup at %s took %.1f s", warmed.size, warmed.seconds)
    else:
        _logger().info(
            "real request-path warmup at %s took %.1f s: %d graph(s) compiled, %d of them in VAE decode",
            warmed.size, warmed.seconds, warmed.graphs, warmed.decode_graphs,
        )  # fmt: skip


def _logger() -> Any:
    return sys.modules[_ENGINE].logger
