"""What the compiler did, from the worker to the log and to `/metrics`.

A worker has no Prometheus registry that anybody scrapes: its events travel to the API server's process, which has the
host's. Each hop uses what the host itself sends along that hop:

1. worker to engine: an attribute of the `DiffusionOutput`, which is pickled with it (or handed over, in one process);
   what was compiled before the server is ready, in the answer to the RPC `diffusion_compile_ready`;
2. engine to client: a key of `OmniRequestOutput.metrics`, where the scheduler's numbers travel too; an engine in the
   process of the API server needs no such key;
3. client to Prometheus: the client takes the key out again, so that neither the host nor a user ever sees it.

A result carries something only for a few results after something was compiled (`compile.delivery` says why a few).

Whose events: those of the ranks that answer requests, that is rank 0, and with concurrent requests over data-parallel
replicas the first rank of each. The others compile the same code for the same request, and counting them as well would
only multiply the numbers. At the end of warmup, failures (fallbacks, recompile limits) of all ranks are gathered, since
one may concern a rank that answers nobody. At run time a fallback is one decision of all ranks that run the region, so
the answering one has it too; a rank outside of it says so in its own log.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_omni_diffusion_compile.compile.delivery import Cursor, Incoming, Outgoing, Parcel
from vllm_omni_diffusion_compile.compile.events import LOG, CompileEvent, summarize
from vllm_omni_diffusion_compile.upstream import fallbacks, reporting
from vllm_omni_diffusion_compile.upstream.execution import executing
from vllm_omni_diffusion_compile.upstream.log import host_logger
from vllm_omni_diffusion_compile.warmup.report import as_yaml

if TYPE_CHECKING:
    from prometheus_client import Counter

logger = host_logger(__name__)

# Attribute of a DiffusionOutput, and key of an OmniRequestOutput's metrics.
EVENTS = "diffusion_compile_events"
# A worker answers in milliseconds; this only keeps a hung one from hanging the start-up.
_RPC_TIMEOUT_S = 60.0
_COMPILED = ("compilation", "recompilation")
# What to do where warmup alone is more than torch compiles.
_MORE_ROOM = "Raise recompile_limit in diffusion_compile_config, or warm up fewer shapes."


# --- in the worker ---------------------------------------------------------------------------------------------------

_outgoing = Outgoing(LOG)
_unsaid = Cursor(LOG)

# On a worker: whether it has executed a request.
_EXECUTED = "_diffusion_compile_executed"


def send_events(execute: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(execute)
    def with_events(self: Any, *args: Any, **kwargs: Any) -> Any:
        setattr(self, _EXECUTED, True)
        try:
            with executing(self, args or tuple(kwargs.values())):
                output = execute(self, *args, **kwargs)
        finally:  # a request may have failed after it waited
            for event in _unsaid.new():
                if event.after_ready or _is_first_limit(event):
                    say_request_waited(event, dynamic=bool(getattr(self.od_config, "diffusion_compile_dynamic", True)))
        for result in _results(output):
            parcel = _outgoing.with_result()
            if parcel is not None:
                setattr(result, EVENTS, parcel)
            break
        return output

    return with_events


def _results(output: Any) -> Iterator[Any]:
    """Find the DiffusionOutputs in what a worker's method returns; a step that finishes no request has none.

    Source: `vllm_omni.diffusion.ipc`, which packs the same shapes.
    """
    if isinstance(output, dict):  # of one data-parallel rank
        output = output.get("output")
    for item in getattr(output, "runner_outputs", None) or [output]:
        result = getattr(item, "result", item)
        if result is not None:
            yield result


def _is_first_limit(event: CompileEvent) -> bool:
    """Whether a region has now reached torch's recompile limit; each piece of its code that does is an event."""
    if event.kind != "recompile limit":
        return False
    key = event.kind, event.component, event.region
    return event is next(other for other in LOG.since()[0] if (other.kind, other.component, other.region) == key)


def say_request_waited(event: CompileEvent, *, dynamic: bool) -> None:
    """Log that a request waited for the compiler: how long, for what, why, and what to do about it.

    Reaching the recompile limit is said during warmup, too: what no graph fits is slow from then on, for everybody.

    Failures are not among it: whoever catches one logs it, with the error.

    Args:
        event: What happened. One of rank 0 is a warning; the other ranks did the same for the same request.
        dynamic: Whether the transformer is compiled for any shape.
    """
    level = logging.WARNING if event.rank == 0 else logging.INFO
    what = f"{event.component} {event.region}"
    shapes = ", ".join(event.shapes) or "unknown shapes"
    if event.kind == "recompile limit":
        logger.log(
            level,
            "%s reached torch's recompile limit at %s (%s). It is compiled no further: calls that no graph fits run "
            "eagerly, and slower. %s",
            what, shapes, event.reason or "no guard named",
            _advice(dynamic, event.request) if event.after_ready else _MORE_ROOM,
        )  # fmt: skip
    elif event.kind in _COMPILED:
        logger.log(
            level,
            "A request waited %.1f s for the %s of %s at %s (%s). %s",
            event.seconds, event.kind, what, shapes, event.reason or "first call", _advice(dynamic, event.request),
        )  # fmt: skip


def _advice(dynamic: bool, request: Mapping[str, Any] | None = None) -> str:
    advice = "To spare users the wait, declare it. In the deploy YAML, under diffusion_compile_config.warmup.shapes:"
    if not dynamic:
        advice = (
            "--no-diffusion-compile-dynamic compiles each size at its first request: leave it out, or declare what you "
            "serve. In the deploy YAML, under diffusion_compile_config.warmup.shapes:"
        )
    return f"{advice}\n  {as_yaml({'width': 'WIDTH', 'height': 'HEIGHT'} if request is None else request)}"


def add_compile_ready(_: None) -> Callable[[Any], list[Parcel]]:
    return diffusion_compile_ready


def diffusion_compile_ready(self: Any) -> list[Parcel]:
    """Note in this worker that the server is ready: what is compiled from now on, a user's request waits for.

    All ranks have to be called together: they exchange what they have.

    Returns:
        What each rank has recorded so far, by rank.
    """
    if getattr(self, _EXECUTED, False) and (idle := fallbacks.idle()):
        logger.warning(
            "Set up to be compiled, and not compiled by any request so far: %s. The model has not called it.",
            ", ".join(idle),
        )
    LOG.rank = int(getattr(self, "rank", LOG.rank))
    LOG.become_ready()
    return _of_all_ranks(_outgoing.everything())


def _of_all_ranks(parcel: Parcel) -> list[Parcel]:
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return [parcel]
    from vllm_omni.diffusion.distributed.parallel_state import get_world_group

    parcels: list[Any] = [None] * distributed.get_world_size()
    # The group on the CPU, as the host does for what it gathers after every RPC.
    distributed.all_gather_object(parcels, parcel, group=get_world_group().cpu_group)
    return parcels


# --- in the engine's process -----------------------------------------------------------------------------------------

_incoming = Incoming()


def ready_after_warmup(run_startup_warmup: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(run_startup_warmup)
    def with_ready(self: Any) -> None:
        run_startup_warmup(self)
        if getattr(self, "executor", None) is None or getattr(self.od_config, "enforce_eager", False):
            return
        # A worker that has not come back from a request would not answer.
        reporting.when_idle(self, functools.partial(_say_ready, self))

    return with_ready


def _say_ready(engine: Any) -> None:
    events = _ready(engine)
    if events:
        logger.info("Compiled before the server is ready: %s.", summarize(events))


def _ready(engine: Any) -> list[CompileEvent]:
    """Tell all workers that the server is ready; returns what was compiled before, as it is counted."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        answers = engine.collective_rpc("diffusion_compile_ready", timeout=_RPC_TIMEOUT_S)
        own, *others = answers[0]
        events = _incoming.take(own)
        for parcel in others:
            events += _incoming.take(parcel, lambda event: event.kind not in _COMPILED)
    except EngineDeadError:
        raise
    except Exception as error:  # noqa: BLE001 - only what is reported depends on it
        logger.info(
            "The workers could not be told that the server is ready (%s: %s): what is compiled from now on is reported "
            "as if it were part of the start.",
            type(error).__name__, error,
        )  # fmt: skip
        return []
    return events


def forward_events(postprocess_output: Callable[[Any, Any, Any], list[Any]]) -> Callable[[Any, Any, Any], list[Any]]:
    @functools.wraps(postprocess_output)
    def with_events(self: Any, request: Any, output: Any) -> list[Any]:
        # Before the host's own turn: it raises for a request that failed.
        parcel = getattr(output, "__dict__", {}).pop(EVENTS, None)
        if parcel is not None:
            reporting.met(self, _incoming.take(parcel))
        formatted = postprocess_output(self, request, output)
        # Of the results before the last one, the client drops all where output is not streamed; of a list, all but the
        # first one.
        if _incoming.waiting and formatted and formatted[0].finished:
            formatted[0].metrics[EVENTS] = _incoming.drain()
        return formatted

    return with_events


# --- in the API server's process -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Server:
    """What the host's metrics are given in this process, for ours to be like them."""

    model_name: str
    log_stats: bool


_server: _Server | None = None


@dataclass(frozen=True, kw_only=True)
class Families:
    """Our metric families, in the registry of the host, and in its multiprocess folder where there is one."""

    compilations: Counter
    seconds: Counter
    fallbacks: Counter
    limits: Counter


@functools.cache
def families() -> Families:
    """Register our metric families, once a process."""
    from prometheus_client import Counter

    where = ["model_name", "stage", "component", "region"]
    return Families(
        compilations=Counter(
            "vllm_omni:diffusion_compile_compilations",
            "Total graphs that torch.compile made, by component, region and kind (compilation / recompilation). Those "
            "with after_ready=true made a user's request wait.",
            labelnames=[*where, "kind", "after_ready"],
        ),
        seconds=Counter(
            "vllm_omni:diffusion_compile_s",
            "Total time spent in torch.compile, in seconds, with the labels of diffusion_compile_compilations.",
            labelnames=[*where, "kind", "after_ready"],
        ),
        fallbacks=Counter(
            "vllm_omni:diffusion_compile_fallbacks",
            "Total regions that run eagerly since the compiler or a compiled call failed, by type of the error.",
            labelnames=[*where, "reason", "after_ready"],
        ),
        limits=Counter(
            "vllm_omni:diffusion_compile_recompile_limit",
            "Total times that a region reached torch's recompile limit. Calls that no graph fits run eagerly since.",
            labelnames=[*where, "after_ready"],
        ),
    )


def register_families(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def with_families(self: Any, model_name: str, log_stats: bool = True) -> None:
        global _server
        init(self, model_name=model_name, log_stats=log_stats)
        families()
        _server = _Server(model_name=model_name, log_stats=log_stats)

    return with_families


def count_of_other_process(get_output: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(get_output)
    def with_counts(self: Any) -> Any:
        output = get_output(self)
        if output is not None:
            _count_attached(self.stage_id, output)
        return output

    return with_counts


def count_of_this_process(get_output: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(get_output)
    def with_counts(self: Any) -> Any:
        output = get_output(self)
        if output is not None:
            _count_attached(self.stage_id, output)
        # Asked for every millisecond: what was compiled during the start, or for a request that failed, waits for no
        # result to come along.
        if _incoming.waiting:
            count(self.stage_id, _incoming.drain())
        return output

    return with_counts


def _count_attached(stage_id: int, output: Any) -> None:
    metrics = getattr(output, "metrics", None)
    if isinstance(metrics, dict) and EVENTS in metrics:
        count(stage_id, metrics.pop(EVENTS))


def count(stage_id: int, events: Iterable[dict[str, Any]]) -> None:
    """Add events to the metrics of this process, if it has any.

    Args:
        stage_id: Stage that they happened in.
        events: `CompileEvent.as_dict` of each.
    """
    if _server is None or not _server.log_stats:
        return
    for data in events:
        try:
            event = CompileEvent.from_dict(data)
        except (TypeError, KeyError) as error:
            logger.warning_once(
                "A compile event of stage %s is not counted: %s. Does the stage run another release of "
                "vllm-omni-diffusion-compile?",
                stage_id, str(error),
            )  # fmt: skip
            continue
        _count(str(stage_id), _server.model_name, event)


def _count(stage: str, model_name: str, event: CompileEvent) -> None:
    labels = {
        "model_name": model_name,
        "stage": stage,
        "component": event.component,
        "region": event.region,
        "after_ready": str(event.after_ready).lower(),
    }
    if event.kind in _COMPILED:
        families().compilations.labels(**labels, kind=event.kind).inc()
        families().seconds.labels(**labels, kind=event.kind).inc(event.seconds)
    elif event.kind == "recompile limit":
        families().limits.labels(**labels).inc()
    else:
        families().fallbacks.labels(**labels, reason=event.error or "unknown").inc()
