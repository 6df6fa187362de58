"""What the adapters of warmup and metrics know together of an engine: its report, and whether it is still busy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from vllm_omni_diffusion_compile.compile.events import CompileEvent
from vllm_omni_diffusion_compile.warmup.report import Report

# On an engine: its report; and the thread that waits for a warmup request that was given up, and holds the engine.
_REPORT = "_diffusion_compile_report"
_BUSY = "_diffusion_compile_busy"


# Of the engine of this process that started last: a server has one, or one for each stage that is not elsewhere.
_latest: Report | None = None


def keep(engine: Any, report: Report) -> None:
    """Show a report, and add to it from now on what users of this engine meet."""
    global _latest
    _latest = report
    setattr(engine, _REPORT, report)


def latest() -> dict[str, Any] | None:
    """Return what the latest report of this process says; None if there is none."""
    return None if _latest is None else _latest.content


def met(engine: Any, events: Iterable[CompileEvent]) -> None:
    """Remember in the engine's report, if it has one, what requests waited for."""
    report: Report | None = getattr(engine, _REPORT, None)
    if report is not None:
        waited = [event for event in events if event.after_ready and event.kind in ("compilation", "recompilation")]
        if waited:
            report.add([event.as_dict() for event in waited])


def busy_until(engine: Any, request: threading.Thread) -> None:
    """Note that an engine does nothing else before a thread ends."""
    setattr(engine, _BUSY, request)


def is_busy(engine: Any) -> bool:
    """Whether an engine still works on a warmup request that was given up."""
    request: threading.Thread | None = getattr(engine, _BUSY, None)
    return request is not None and request.is_alive()


def when_idle(engine: Any, do: Callable[[], None]) -> None:
    """Do something now, or as soon as the engine is not busy any more."""
    if not is_busy(engine):
        do()
        return
    request: threading.Thread = getattr(engine, _BUSY)

    def wait() -> None:
        request.join()
        do()

    threading.Thread(target=wait, name="diffusion-compile-ready", daemon=True).start()
