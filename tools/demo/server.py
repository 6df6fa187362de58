"""A `vllm serve` in a session of its own, with private empty caches, that leaves no process behind."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import httpx

from vllm_omni_diffusion_compile.bench.interrupts import deferred
from vllm_omni_diffusion_compile.bench.session import Session

if TYPE_CHECKING:
    from typing_extensions import Self

START_LIMIT_S = 1800.0
# What each signal is given before the next, harder one. A server whose compiler runs ends once that returns.

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
# "(DiffusionWorker pid=9953) INFO 11-29 19:30:43 [manager.py:112] Initializing ..."; what starts otherwise is the logo.
_LOG_LINE = re.compile(r"(?:INFO|WARNING|ERROR) \d\d-\d\d \S+ \[[^\]]+\] ([\[A-Za-z].*\S)")


class ServerError(Exception):
    """A server did not start, did not answer as it should, or did not go away."""


class Server:
    """One server, as a context manager.

    Args:
        model: Folder of the checkpoint.
        flags: Further flags of `vllm serve`.
        plugins: Value of VLLM_PLUGINS.
        log: File for everything that its processes print.

    Attributes:
        traces: Folder of torch's traces; it goes when the context ends.
        ready: Unix time in seconds at which /health first answered.
    """

    def __init__(self, model: Path, flags: tuple[str, ...], *, plugins: str, log: Path) -> None:
        self.log = log
        self.ready = 0.0
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        # Before the user's flags, which win. A slow machine compiles for longer than vLLM-Omni waits for a stage.
        patience = [f"{flag}={START_LIMIT_S:.0f}" for flag in ("--stage-init-timeout", "--init-timeout")]
        # After them, so that these win.
        address = ["--host", "127.0.0.1", "--port", str(port)]
        self._arguments = ["serve", str(model), "--omni", *patience, *flags, *address]
        self._plugins = plugins
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._session: Session | None = None
        self._started = 0.0

    @property
    def command(self) -> str:
        """What to type for the same server."""
        return f"VLLM_PLUGINS={self._plugins} {shlex.join(['vllm', *self._arguments])}"

    @property
    def traces(self) -> Path:
        """Folder that torch writes its trace to."""
        assert self._folder is not None, "the server was not started"
        return Path(self._folder.name, "torch-trace")

    def __enter__(self) -> Self:
        try:
            # Between a fork and the moment we know of it, an interrupt would leave a server that nobody stops.
            with deferred():
                self._start()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()

    def wait_ready(self, show: Callable[[str], None]) -> float:
        """Wait until /health answers.

        Args:
            show: Told a few times a second what the log said last.

        Returns:
            Seconds since the process was started.

        Raises:
            ServerError: It ended, or was not ready in time.
        """
        assert self._process is not None, "the server was not started"
        with httpx.Client(base_url=self.url, timeout=2) as client:
            while (seconds := time.monotonic() - self._started) < START_LIMIT_S:
                if (code := self._process.poll()) is not None:
                    raise ServerError(f"the server ended with status {code} after {seconds:.0f} s, before it was ready")
                try:
                    if client.get("/health").status_code == httpx.codes.OK:
                        self.ready = time.time()
                        return time.monotonic() - self._started
                except httpx.TransportError:
                    pass  # nobody listens yet
                show(self.last_message())
                time.sleep(0.2)
        raise ServerError(f"the server was not ready after {START_LIMIT_S:.0f} s")

    def last_message(self) -> str:
        """Return the last line of the log that says something, without its time and place."""
        messages = (match[1] for line in reversed(log_lines(self.log)) if (match := _LOG_LINE.search(line)))
        return next(messages, "starting")

    def total_in_log(self, pattern: re.Pattern[str]) -> int:
        """Add up a number over all lines of the log that have it; the pattern's first group is the number."""
        return sum(int(match[1]) for line in log_lines(self.log) if (match := pattern.search(line)))

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="diffusion-compile-demo-", ignore_cleanup_errors=True)
        environment = _environment(Path(self._folder.name), self._plugins)
        self._started = time.monotonic()
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(Path(sys.executable).with_name("vllm")), *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self._session = Session(self._process)

    def _close(self) -> None:
        with deferred():
            left = self._session.stop() if self._session is not None else []
            if self._folder is not None:
                self._folder.cleanup()
        if left:
            raise ServerError(f"still there after SIGKILL: {', '.join(str(process) for process in left)}")


def log_lines(file: Path) -> list[str]:
    """Read a server's log, without its colours."""
    return _ESCAPES.sub("", file.read_text(errors="replace")).splitlines()


def _environment(folder: Path, plugins: str) -> dict[str, str]:
    """Return the environment of a server that neither finds nor leaves anything that was compiled."""
    private = {
        "VLLM_CACHE_ROOT": "vllm",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "TRITON_CACHE_DIR": "triton",
        "TORCH_TRACE": "torch-trace",
        # torch keeps its precompiled C++ headers below the temporary folder, whatever TORCHINDUCTOR_CACHE_DIR says.
        "TMPDIR": "tmp",
    }
    for name in private.values():
        (folder / name).mkdir(mode=0o700)
    return {
        **os.environ,
        **{variable: str(folder / name) for variable, name in private.items()},
        "VLLM_PLUGINS": plugins,
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "NO_COLOR": "1",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
