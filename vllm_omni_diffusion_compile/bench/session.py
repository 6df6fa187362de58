"""All processes of a server: those of its session, and children that it had, wherever they went."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time

import psutil

_STOP_SIGNALS = ((signal.SIGINT, 10.0), (signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0))


class Session:
    """The processes that one started.

    Args:
        first: Started in a session of its own.
    """

    def __init__(self, first: subprocess.Popen[bytes]) -> None:
        self._first = first
        self._seen: set[psutil.Process] = set()

    def living(self) -> list[psutil.Process]:
        """Return those that live."""
        self._first.poll()  # reaps it
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == self._first.pid:
                    self._seen.add(process)
                    self._seen.update(process.children(recursive=True))
            except (psutil.Error, OSError):
                pass  # it went meanwhile, or is none of ours
        return [process for process in self._seen if _lives(process)]

    def stop(self) -> list[psutil.Process]:
        """Stop them all, the harder the longer it takes; return those that are still there."""
        for number, limit_s in _STOP_SIGNALS:
            for process in self.living():
                with contextlib.suppress(psutil.NoSuchProcess):  # it went meanwhile
                    process.send_signal(number)
            deadline = time.monotonic() + limit_s
            while self.living() and time.monotonic() < deadline:
                time.sleep(0.1)
            if not self.living():
                break
        return self.living()


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
