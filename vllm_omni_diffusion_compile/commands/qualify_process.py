"""The processes of arms: each a session of its own, so that nothing of a model outlives what was asked of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from vllm_omni_diffusion_compile.bench.session import Session
from vllm_omni_diffusion_compile.commands.qualify_arm import RESULT
from vllm_omni_diffusion_compile.errors import EvidenceError

LOG = "log.txt"
_POLL_S = 0.2
# A process that left its session is found by its parent, while that one lives.
_LOOK_S = 5.0
# Where an engine listens: two at once would want the same port.
_PORTS = ("MASTER_PORT", "VLLM_PORT")
# Threads that wait for one another do not spin: beside another process that takes the time of whom they wait for.
_WAITING = {"OMP_WAIT_POLICY": "PASSIVE"}


class StoppedError(EvidenceError):
    """All processes were told to stop."""


class Processes:
    """Runs arms, from several threads at once if need be, until told to stop.

    Attributes:
        left: What was still there after SIGKILL.
    """

    def __init__(self) -> None:
        self.left: list[str] = []
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Have every `run`, those to come too, end its processes and raise `StoppedError`."""
        self._stopped.set()

    def run(self, folder: Path, timeout_s: float) -> dict[str, Any]:
        """Run the process of an arm; when it hangs or dies, that is the result.

        Args:
            folder: Has what `qualify_arm` reads.
            timeout_s: What it may take.

        Raises:
            StoppedError: Somebody called `stop`.
            EvidenceError: A process is still there after SIGKILL.
        """
        if self._stopped.is_set():
            raise StoppedError("stopped before it began")
        (folder / RESULT).unlink(missing_ok=True)
        command = [sys.executable, "-m", "vllm_omni_diffusion_compile.commands.qualify_arm", str(folder)]
        environment = _WAITING | {name: value for name, value in os.environ.items() if name not in _PORTS}
        with (folder / LOG).open("wb") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment,
                start_new_session=True,
            )  # fmt: skip
            session = Session(process)
            try:
                status = self._status(process, session, timeout_s)
            finally:
                left = session.stop()
                self.left += map(str, left)
        if left:
            raise EvidenceError(f"still there after SIGKILL: {', '.join(map(str, left))}")
        if status is None:
            return _error("TimeoutError", f"no answer within {timeout_s:g} s; see {LOG}")
        try:
            result: dict[str, Any] = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return _error("ProcessError", f"the process ended with status {status} and no result; see {LOG}")
        return result

    def _status(self, process: subprocess.Popen[bytes], session: Session, timeout_s: float) -> int | None:
        """Wait for the end of a process; return its status, or None if it took too long."""
        now = time.monotonic()
        deadline, look = now + timeout_s, now + _LOOK_S
        while (now := time.monotonic()) < deadline:
            if self._stopped.is_set():
                raise StoppedError("stopped while it ran")
            if now >= look:
                session.living()
                look = now + _LOOK_S
            try:
                return process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                continue
        return None


def _error(kind: str, message: str) -> dict[str, Any]:
    return {"error": {"type": kind, "message": message}}
