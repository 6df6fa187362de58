"""Warmup requests on the engine's ordinary path, after vLLM-Omni's own dummy run."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import sys
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from vllm_omni_diffusion_compile.settings import VAE
from vllm_omni_diffusion_compile.upstream.answerable import PROMPT, warmup_of, why_no_request
from vllm_omni_diffusion_compile.upstream.shutdown import told_to_stop
from vllm_omni_diffusion_compile.warmup.plan import Size
from vllm_omni_diffusion_compile.warmup.run import CompileFacts, Warmed, first_request, further_requests

_ENGINE = "vllm_omni.diffusion.diffusion_engine"
# A worker answers in milliseconds; this only keeps a hung one from hanging the start-up.
_RPC_TIMEOUT_S = 60.0
# What `DiffusionWorker.diffusion_compile_facts` answers.
_FACTS = {"generic", "graphs", "decodes", "decode_graphs"}

# A video model takes one frame from a real request as "not stated" and makes its full length of it. Nine is the
# smallest count above one that temporal strides of 4 and of 8 both accept (4n+1, 8n+1).
_VIDEO_FRAMES = 9

# On an engine whose first warmup request came back: how many denoise steps it took.
_STEPS = "_diffusion_compile_warmed_steps"


def real_request_after_dummy_run(dummy_run: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(dummy_run)
    def _dummy_run(self: Any) -> None:
        dummy_run(self)
        with _best_effort():
            reason = _why_not(self)
            if reason is not None:
                _logger().info("No real request-path warmup: %s.", reason)
                return
            for warmed in first_request(_Sender(self), functools.partial(_facts, self), _dummy_steps(self)):
                _log(warmed)
                if warmed.error is None:
                    setattr(self, _STEPS, warmed.steps)

    return _dummy_run


def further_sizes_after_warmup(run_startup_warmup: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(run_startup_warmup)
    def with_further_sizes(self: Any) -> None:
        run_startup_warmup(self)
        with _best_effort():
            steps = vars(self).pop(_STEPS, None)
            if steps is not None:
                for warmed in further_requests(_Sender(self), functools.partial(_facts, self), steps):
                    _log(warmed)

    return with_further_sizes


class _ToldToStop(Exception):  # noqa: N818 - nothing went wrong
    pass


@contextlib.contextmanager
def _best_effort() -> Iterator[None]:
    """Whatever fails in warmup is said and not held against the server, unless nothing is left that could serve."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError:
        raise
    except _ToldToStop:
        _logger().info("No further warmup: the server was told to stop.")
    except Exception as error:  # noqa: BLE001 - said with its traceback; without warmup the server works as before
        _logger().warning(
            "real request-path warmup ended with %s: %s; serving will continue",
            type(error).__name__, error, exc_info=True,
        )  # fmt: skip


def _why_not(engine: Any) -> str | None:
    """Why this stage gets no warmup request; None if it gets one."""
    config = engine.od_config
    model = getattr(config, "model_class_name", None)
    if getattr(config, "enforce_eager", False):
        return "compilation is off (enforce_eager)"
    if not getattr(config, VAE, False):
        return f"{VAE} is off"
    if warmup_of(config).shapes:
        return "the declared shapes are warmed instead"
    reason = why_no_request(config)
    if reason is not None:
        return reason
    if _compiles_itself(model):
        return f"{model} compiles itself with setup_compile()"
    answers = _ask_workers(engine)
    if answers and not all(answer["generic"] for answer in answers):
        return "the model runner compiles nothing here: no inductor, or a custom pipeline with setup_compile()"
    if _takes_no_dummy_run(model):
        return f"{model} takes no dummy run, so nothing is known of what it can be asked"
    return None


def _compiles_itself(model: str | None) -> bool:
    from vllm_omni.diffusion.registry import DiffusionModelRegistry

    # A pipeline that the registry does not know is asked for through the workers.
    return model is not None and hasattr(DiffusionModelRegistry._try_load_model_cls(model), "setup_compile")


def _takes_no_dummy_run(model: str | None) -> bool:
    engine = sys.modules[_ENGINE]
    return model is not None and engine.get_dummy_run_num_frames(model, False) <= 0


class _Sender:
    """Sends a request of a size and a number of steps, and waits for it; returns its error, or None."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._like: dict[Size, Any] = {}

    def __call__(self, size: Size, steps: int) -> str | None:
        from vllm.v1.engine.exceptions import EngineDeadError

        if told_to_stop():
            raise _ToldToStop
        if size not in self._like:
            dummy = self._engine._make_dummy_request(height=size.height, width=size.width, guidance_scale=0.0)
            self._like[size] = dummy
        request = _request(self._engine, self._like[size], steps)
        _logger().info("Warming up with a request of %s; compiling may take minutes.", size)
        try:
            output = self._engine.add_req_and_wait_for_response(request)
        except EngineDeadError:
            raise
        except Exception as error:  # noqa: BLE001 - warmup is best effort: the log says what failed, and serving goes on
            return f"{type(error).__name__}: {error}"
        return str(output.error) if output.error else None


def _request(engine: Any, dummy: Any, steps: int) -> Any:
    """A request as a user would send it: text alone, an ordinary id, the model's own guidance, frames stated."""
    request = copy.copy(dummy)
    request.request_id = f"warmup-{uuid.uuid4().hex}"
    request.prompt = {"prompt": PROMPT}
    params = request.sampling_params = copy.copy(request.sampling_params)
    params.num_inference_steps = steps
    params.num_frames = _frames(engine, params.num_frames)
    params.need_kv_receive = False
    # The dummy run switches guidance off; None leaves it to the model, as in a request that does not mention it.
    params.guidance_scale = params.guidance_scale_2 = None
    params.guidance_scale_provided = params.guidance_scale_2_provided = False
    params.extra_args = {}
    if hasattr(request, "__post_init__"):
        request.__post_init__()  # fills in what depends on guidance, as the constructor does
    return request


def _frames(engine: Any, dummy_frames: int) -> int:
    from vllm_omni.diffusion.io_support import get_diffusion_output_type

    if dummy_frames == 1 and get_diffusion_output_type(engine.od_config.model_class_name) == "video":
        return _VIDEO_FRAMES
    return dummy_frames


def _dummy_steps(engine: Any) -> int:
    """Denoise steps of the release's dummy run: 0.30.0 states two, 0.28.0 always takes one."""
    try:
        parameters = inspect.signature(type(engine)._make_dummy_request).parameters
    except (AttributeError, TypeError, ValueError):
        return 1
    return 2 if "num_inference_steps" in parameters else 1


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
    """What the workers have compiled; empty if they cannot be asked."""
    if getattr(engine, "executor", None) is None:  # an engine that has no workers yet
        return []
    try:
        answers = engine.collective_rpc("diffusion_compile_facts", timeout=_RPC_TIMEOUT_S)
    except Exception as error:  # noqa: BLE001 - without an answer there is one warmup request, and no further size
        _logger().info("The workers could not be asked what they compiled (%s: %s).", type(error).__name__, error)
        return []
    return [answer for answer in (answers if isinstance(answers, list) else [answers]) if _is_facts(answer)]


def _is_facts(answer: object) -> bool:
    return isinstance(answer, dict) and answer.keys() >= _FACTS


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
