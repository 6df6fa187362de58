"""Warmup of the shapes that the user declared, on the engine's ordinary path, after vLLM-Omni's own warmup."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_omni_diffusion_compile import __version__
from vllm_omni_diffusion_compile.compile.events import LOG
from vllm_omni_diffusion_compile.errors import WarmupError
from vllm_omni_diffusion_compile.settings import CONFIG, NAMES, Lora, Shape, WarmupConfig
from vllm_omni_diffusion_compile.upstream import reporting
from vllm_omni_diffusion_compile.upstream.adapters import load_adapters, lora_request
from vllm_omni_diffusion_compile.upstream.answerable import (
    PROMPT,
    extra_args,
    has_packed_length,
    warmup_of,
    why_no_request,
)
from vllm_omni_diffusion_compile.upstream.execution import DECLARED
from vllm_omni_diffusion_compile.upstream.log import host_logger
from vllm_omni_diffusion_compile.upstream.serving_thread import warm_where_it_serves
from vllm_omni_diffusion_compile.upstream.shutdown import told_to_stop
from vllm_omni_diffusion_compile.warmup.declared import Answer, Budget, Outcome, warm_shapes
from vllm_omni_diffusion_compile.warmup.report import Report, as_text, document

logger = host_logger(__name__)

# A worker answers in milliseconds; this only keeps a hung one from hanging the start-up.
_RPC_TIMEOUT_S = 60.0
# How often the progress bar is drawn anew while a request runs.
_TICK_S = 0.5


def declared_shapes_after_warmup(run_startup_warmup: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(run_startup_warmup)
    def with_declared_shapes(self: Any) -> None:
        config = warmup_of(self.od_config)
        _say_without_effect(self.od_config)
        budget = Budget(config.budget_s)
        unloaded = _load_adapters(self, config, budget)
        run_startup_warmup(self)
        if not config.shapes and config.report_path is None:
            return
        outcomes = list(_warm(self, config, budget, unloaded))
        report = document(
            outcomes, budget_s=config.budget_s, spent_s=budget.spent, about=_about(self), eager=_failed_to_compile(self)
        )
        if any(outcome.requests for outcome in outcomes):
            logger.info("Declared shapes, warm in %.1f s:\n%s", budget.spent, as_text(report))
        _keep(self, config, report)
        # Where nothing is compiled no request waits for the compiler, whatever was warmed.
        if config.on_failure == "fail" and not getattr(self.od_config, "enforce_eager", False):
            _refuse(self, outcomes)

    return with_declared_shapes


def _load_adapters(engine: Any, config: WarmupConfig, budget: Budget) -> dict[Lora, str]:
    """Load what the declared shapes name, before layers are compiled that it replaces; returns what failed, and why."""
    if getattr(engine.od_config, "enforce_eager", False) or why_no_request(engine.od_config) is not None:
        return {}
    return load_adapters(engine, config.adapters, lambda: budget.left, stop=told_to_stop)


def _say_without_effect(config: Any) -> None:
    settings = getattr(config, CONFIG, None) or {}
    if isinstance(settings, dict) and settings.get("pad_seq_buckets") and not has_packed_length(config):
        logger.warning(
            "%s.pad_seq_buckets has no effect: %s has no packed sequence. It is for MiniMax-H3 alone.",
            CONFIG, getattr(config, "model_class_name", None),
        )  # fmt: skip


def _about(engine: Any) -> dict[str, Any]:
    config = engine.od_config
    return {
        "release": __version__,
        "model": str(getattr(config, "model", "")),
        "model_class": getattr(config, "model_class_name", None),
        "settings": {name: getattr(config, name, None) for name in NAMES},
    }


def _failed_to_compile(engine: Any) -> list[str]:
    """What runs eagerly since the compiler failed for it, in any worker that can be asked."""
    if reporting.is_busy(engine):  # with a request that was given up: nobody would answer
        return []
    return list(dict.fromkeys(name for usage in _usage(engine) for name in usage.get("eager", ())))


def _keep(engine: Any, config: WarmupConfig, content: dict[str, Any]) -> None:
    path = None if config.report_path is None else Path(config.report_path).expanduser().absolute()

    def failed(error: OSError) -> None:
        logger.warning(
            "The report on the start could not be written to warmup.report_path %s (%s); the server works without it.",
            path, error,
        )  # fmt: skip

    report = Report(content, path, failed)
    report.write()
    reporting.keep(engine, report)


def _refuse(engine: Any, outcomes: list[Outcome]) -> None:
    """End the start if a shape that the server was to be warm for is not.

    Raises:
        WarmupError: One was skipped, was given up, or failed.
    """
    cold = [outcome for outcome in outcomes if not outcome.succeeded]
    if not cold:
        return
    if reporting.is_busy(engine):
        engine.executor.shutdown()  # to close the engine as well is to wait for what hangs
    else:
        engine.close()
    raise WarmupError(
        "declared shapes are not warm: "
        + "; ".join(f"{outcome.shape} {outcome.state}: {outcome.reason}" for outcome in cold)
        + ". Leave them out of diffusion_compile_config.warmup.shapes, or set warmup.on_failure to 'serve'"
    )


def _warm(engine: Any, config: WarmupConfig, budget: Budget, unloaded: Mapping[Lora, str]) -> Iterator[Outcome]:
    shapes = config.warmed
    if not shapes:
        return
    off = getattr(engine.od_config, "enforce_eager", False)
    reason = "compilation is off (enforce_eager)" if off else why_no_request(engine.od_config)
    if reason is not None:
        (logger.info if off else logger.warning)("Declared shapes are not warmed: %s.", reason)
        yield from (Outcome(shape=shape, state="skipped", reason=reason) for shape in shapes)
        return
    warm_where_it_serves(engine)
    with _progress(len(shapes)) as progress:
        send = _Sender(engine, progress, unloaded)
        for outcome in warm_shapes(shapes, send, budget, begin=progress.begin, stop=told_to_stop):
            progress.end(outcome)
            yield outcome


class _Progress:
    """A bar on a terminal, and lines in a log."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        # Of the shapes that are done; and in this process, when the one at hand began.
        self._done = 0
        self._before = 0

    def begin(self, shape: Shape) -> None:
        self._bar.set_description(str(shape))
        self._before = len(LOG.since()[0])
        if self._bar.disable:
            logger.info("Warming up with a request of %s; compiling may take minutes.", shape)

    def tick(self, seconds: float) -> None:
        # What workers in processes of their own compile is known when they have answered.
        events = self._done + len(LOG.since()[0]) - self._before
        self._bar.set_postfix_str(f"{seconds:.0f} s, {events} compile events")

    def end(self, outcome: Outcome) -> None:
        self._bar.update()
        self._done += outcome.compile_events or 0
        if not outcome.succeeded:
            logger.warning("Warmup of %s: %s (%s).", outcome.shape, outcome.state, outcome.reason)
        elif self._bar.disable and outcome.cold is not None:
            logger.info(
                "Warmup of %s took %.1f s: %s compile event(s) in %d request(s); %s.",
                outcome.shape, outcome.cold.total_s, outcome.compile_events, outcome.requests, outcome.state,
            )  # fmt: skip


@contextmanager
def _progress(shapes: int) -> Iterator[_Progress]:
    from tqdm import tqdm

    with tqdm(total=shapes, disable=not sys.stderr.isatty(), unit="shape", dynamic_ncols=True) as bar:
        yield _Progress(bar)


class _Sender:
    """Sends a request of a shape, and waits for it as long as the budget lasts.

    In a thread of its own, which is new as the engine's own is when it serves: whatever torch keeps by thread (grad and
    inference mode, autocast, the current device) is in warmup as it will be in service. A worker in this process
    computes in one thread for both.
    """

    def __init__(self, engine: Any, progress: _Progress, unloaded: Mapping[Lora, str]) -> None:
        self._engine = engine
        self._progress = progress
        self._unloaded = unloaded
        self._prompts: dict[int | None, tuple[str, int | None]] = {}

    def __call__(self, shape: Shape, steps: int | None, timeout_s: float | None) -> Answer:
        from vllm.v1.engine.exceptions import EngineDeadError

        if shape.lora is not None and shape.lora in self._unloaded:
            return Answer(error=self._unloaded[shape.lora])
        prompt, rows = self._prompt(shape)
        try:
            request = self._request(shape, steps, prompt)
        except Exception as error:  # noqa: BLE001 - a shape that no request can be made of has failed
            return Answer(error=f"{type(error).__name__}: {error}", prompt_rows=rows)
        usage = _usage(self._engine)
        sent = _Moment(at=time.time(), usage=usage)
        outcome: list[Any] = []

        def run() -> None:
            try:
                output = self._engine.add_req_and_wait_for_response(request)
                _postprocess(self._engine, request, output)
                outcome.append(output)
            except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
                outcome.append(error)

        thread = threading.Thread(target=run, name="diffusion-compile-warmup", daemon=True)
        start = time.monotonic()
        thread.start()
        while thread.is_alive():
            passed = time.monotonic() - start
            if timeout_s is not None and passed >= timeout_s:
                self._give_up(request.request_id, thread)
                return Answer(gave_up=True, prompt_rows=rows)
            thread.join(_TICK_S if timeout_s is None else min(_TICK_S, timeout_s - passed))
            self._progress.tick(time.monotonic() - start)
        received_at = time.time()
        (output,) = outcome
        if isinstance(output, Exception) and not isinstance(output, EngineDeadError):
            return Answer(error=f"{type(output).__name__}: {output}", prompt_rows=rows)
        if isinstance(output, BaseException):
            raise output
        return _answer(output, rows, sent, _Moment(at=received_at, usage=_usage(self._engine)))

    def _give_up(self, request_id: str, thread: threading.Thread) -> None:
        """Abort a request that hangs, where the model looks for that; the start goes on either way."""
        reporting.busy_until(self._engine, thread)
        # `abort` would wait for the lock that the hanging request holds.
        self._engine.abort_queue.put(request_id)
        cancellations = getattr(self._engine, "_request_cancellations", None)
        if cancellations is not None:
            cancellations.cancel([request_id])
        logger.warning(
            "A warmup request was given up for the budget. The engine works on it all the same, and users' requests "
            "wait until it ends."
        )

    def _request(self, shape: Shape, steps: int | None, prompt: str) -> Any:
        """A request as a user would send it."""
        from vllm_omni.diffusion.request import OmniDiffusionRequest
        from vllm_omni.inputs.data import OmniDiffusionSamplingParams

        words: dict[str, Any] = {"prompt": prompt}
        if shape.negative_prompt is not None:
            words["negative_prompt"] = shape.negative_prompt
        pictures = [self._picture(*size) for size in shape.image_sizes]
        if pictures:
            words["multi_modal_data"] = {"image": pictures[0] if len(pictures) == 1 else pictures}
        adapter: dict[str, Any] = {}
        if shape.lora is not None:
            adapter = {"lora_request": lora_request(shape.lora), "lora_scale": shape.lora.scale}
        return OmniDiffusionRequest(
            prompt=words,
            request_id=f"{DECLARED}{uuid.uuid4().hex}",
            sampling_params=OmniDiffusionSamplingParams(
                width=shape.width,
                height=shape.height,
                num_frames=shape.frames or 1,
                num_inference_steps=steps,
                guidance_scale=shape.guidance_scale,
                true_cfg_scale=shape.true_cfg_scale,
                extra_args=extra_args(self._engine.od_config.model_class_name, shape.extra_args),
                need_kv_receive=False,
                **adapter,
            ),
        )

    def _picture(self, width: int, height: int) -> Any:
        import numpy as np
        from PIL import Image
        from vllm_omni.diffusion.io_support import image_color_format

        pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
        return Image.fromarray(pixels).convert(image_color_format(self._engine.od_config.model_class_name))

    def _prompt(self, shape: Shape) -> tuple[str, int | None]:
        rows = shape.prompt_rows
        if rows not in self._prompts:
            answers = _rpc(self._engine, "diffusion_compile_prompt", rows, PROMPT)
            text, reached = answers[0] if answers else (PROMPT, None)
            if rows is not None and reached != rows:
                nearest = (
                    "there is no tokenizer to count them with" if reached is None else f"the nearest has {reached}"
                )
                logger.info("A prompt of %d tokens was asked for; %s.", rows, nearest)
            self._prompts[rows] = (text, reached)
        return self._prompts[rows]


def _usage(engine: Any) -> list[dict[str, Any]]:
    return [answer for answer in _rpc(engine, "diffusion_compile_usage") if isinstance(answer, dict)]


def _rpc(engine: Any, method: str, *args: Any) -> list[Any]:
    """What the workers answer; nothing if they cannot be asked."""
    if getattr(engine, "executor", None) is None:
        return []
    try:
        answers = engine.collective_rpc(method, timeout=_RPC_TIMEOUT_S, args=args)
    except Exception as error:  # noqa: BLE001 - without an answer the report says less
        logger.info("The workers could not be asked for %s (%s: %s).", method, type(error).__name__, error)
        return []
    return list(answers) if isinstance(answers, list) else [answers]


def _postprocess(engine: Any, request: Any, output: Any) -> None:
    """Make of the output what a user's request would get: what this imports and sets up is there then, too."""
    if output.error or (output.output is None and getattr(output, "media", None) is None):
        return
    try:
        # The release's own: ours would hand the events of the start to a user's result that does not exist.
        inspect.unwrap(type(engine).postprocess_output)(engine, request, output)
    except Exception as error:  # noqa: BLE001 - the request was answered; that is what the shape is warm for
        logger.info("The output of a warmup request was not made ready (%s: %s).", type(error).__name__, error)


@dataclass(frozen=True, kw_only=True)
class _Moment:
    """When it was, and what each worker had compiled by then."""

    at: float
    usage: list[dict[str, Any]]


# Of what a worker answers, what is counted up.
_COUNTED = ("graphs", "events", "compile_s")


def _answer(output: Any, rows: int | None, sent: _Moment, received: _Moment) -> Answer:
    known = bool(sent.usage) and len(sent.usage) == len(received.usage)
    pairs = list(zip(sent.usage, received.usage, strict=True)) if known else []
    more = {key: max(after[key] - before[key] for before, after in pairs) for key in _COUNTED} if known else {}
    # Of the rank that answers.
    executions = [execution for usage in received.usage[:1] for execution in usage["executions"]]
    began, ended = (executions[0][0], executions[-1][1]) if executions else (None, None)
    return Answer(
        error=str(output.error) if output.error else None,
        graphs=more.get("graphs"),
        compile_events=more.get("events"),
        compile_s=more.get("compile_s"),
        # By one machine's clock: workers run where their engine does.
        preparation_s=None if began is None else max(0.0, began - sent.at),
        execution_s=sum(end - begin for begin, end in executions) if executions else None,
        transport_s=None if ended is None else max(0.0, received.at - ended),
        peak_memory_mb=getattr(output, "peak_memory_mb", 0.0) or None,
        stages=dict(getattr(output, "stage_durations", None) or {}),
        prompt_rows=rows,
    )
