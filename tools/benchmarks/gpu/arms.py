"""The arms of a benchmark: processes of their own that are asked for one thing after the other."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# Plugins that a stock server would have, and what lets it run without an accelerator.
_STOCK_PLUGINS = "vllm_omni_register_models,diffusion_cpu"


def plugins(ours: bool) -> str:
    """Return the VLLM_PLUGINS of an arm with this package, or of a stock one."""
    return _STOCK_PLUGINS + ",diffusion_compile" * ours


class Process:
    """One arm; if it failed or was too slow it is asked nothing more.

    Args:
        make: Makes what answers, in the process and at the first question; has to be importable.
        given: Its arguments.
        temporary: Folder for the process's temporary files, made where it is missing.
        environment: Further environment variables.

    Attributes:
        result: What is known of this arm; `error` says why it is asked nothing more.
    """

    def __init__(self, make: Callable[..., Any], *given: Any, temporary: Path, environment: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        temporary.mkdir(parents=True, exist_ok=True)
        self._process = context.Process(
            target=_answer, args=(theirs, {**environment, "TMPDIR": str(temporary)}, make, given)
        )
        self._process.start()
        theirs.close()
        self.result: dict[str, Any] = {}

    def tell(self, method: str, *arguments: Any) -> None:
        """Ask for something without waiting for it."""
        if "error" in self.result:
            return
        try:
            self._pipe.send((method, arguments))
        except BrokenPipeError:
            self._give_up("the process ended")

    def answer(self, limit_s: float) -> Any:
        """Wait for what was asked for; None if it failed or took too long."""
        if "error" in self.result:
            return None
        try:
            in_time = self._pipe.poll(max(0.0, limit_s))
            good, value = self._pipe.recv() if in_time else (False, f"no answer within {limit_s:.0f} s")
        except EOFError:
            good, value = False, "the process ended"
        if good:
            return value
        self._give_up(value)
        return None

    def ask(self, limit_s: float, method: str, *arguments: Any) -> Any:
        """Ask, and wait."""
        self.tell(method, *arguments)
        return self.answer(limit_s)

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._process.join()

    def _give_up(self, why: str) -> None:
        self.result["error"] = why
        self.stop()


def _answer(pipe: Connection, environment: Mapping[str, str], make: Callable[..., Any], given: tuple[Any, ...]) -> None:
    os.environ |= environment
    tempfile.tempdir = None
    answers: Any = None
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:  # the benchmark has ended
            break
        try:
            if answers is None:
                answers = make(*given)
            pipe.send((True, getattr(answers, method)(*arguments)))
        except Exception:  # noqa: BLE001 - it is told, and the other arms go on
            pipe.send((False, traceback.format_exc()[-3000:]))
    os._exit(0)  # an engine's threads outlive `main`
