"""A server of one arm: a process group of its own, with a private cache and log, that leaves no process behind."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vllm_omni_diffusion_compile.bench.interrupts import deferred
from vllm_omni_diffusion_compile.bench.session import Session
from vllm_omni_diffusion_compile.errors import BenchError

_POLL_S = 0.1
_TAIL_LINES = 40
# vLLM's own variable for the key of its server.
_API_KEY = "VLLM_API_KEY"
# What would have compiled artifacts kept elsewhere than in the private directory, or not at all.
_CACHE_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_DISABLE_COMPILE_CACHE")

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
# "(DiffusionWorker pid=9953) INFO 11-29 19:30:43 [manager.py:112] Initializing ..."; what starts otherwise is the logo.
_LOG_LINE = re.compile(r"(?:INFO|WARNING|ERROR) \d\d-\d\d \S+ \[[^\]]+\] ([\[A-Za-z].*\S)")


# vLLM's filter of plugins, and our entry point among them.
_PLUGINS, _OURS = "VLLM_PLUGINS", "diffusion_compile"


class OutOfTimeError(BenchError):
    """Something took longer than it was given. The message says what."""


def find_vllm() -> str:
    """Find `vllm`: that of the environment this runs in, else what the shell would find.

    Raises:
        BenchError: There is none, or it would not load this package.
    """
    plugins = os.environ.get(_PLUGINS)
    if plugins is not None and _OURS not in plugins.split(","):
        raise BenchError(
            f"{_PLUGINS} is {plugins!r}, so no server would load this package; add {_OURS}, or leave the variable out"
        )
    beside = Path(sys.executable).with_name("vllm")
    found = str(beside) if beside.is_file() else shutil.which("vllm")
    if found is None:
        raise BenchError("there is no program `vllm`; run this in the environment that has vLLM and vLLM-Omni")
    return found


class Server:
    """One server.

    Args:
        command: The program and its arguments; where it listens is added.
        log: File for everything that its processes print.
        working: Folder for what is private to this start and goes with it.
        private_caches: Keep caches there as well, so that the start is a cold one but for what the command names.

    Attributes:
        command: All of it.
        environment: What is set for it beside the bench's own environment.
    """

    def __init__(self, command: Sequence[str], *, log: Path, working: Path, private_caches: bool = True) -> None:
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.command = [*command, "--host", "127.0.0.1", "--port", str(port)]
        self.environment: dict[str, str] = {}
        self._log = log
        self._working = working
        self._private_caches = private_caches
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._session: Session | None = None
        self._started = 0.0

    def start(self) -> None:
        """Start the process and return at once; whoever does has to `close`."""
        # Between a fork and the moment we know of it, an interrupt would leave a server that nobody stops.
        with deferred():
            self._start()

    def close(self) -> None:
        """Stop every process of it, if there is any, and remove what was private to it.

        Raises:
            BenchError: Something is still there.
        """
        with deferred():
            left = self._session.stop() if self._session is not None else []
            if self._folder is not None:
                self._folder.cleanup()
        if left:
            raise BenchError(f"still there after SIGKILL: {', '.join(str(process) for process in left)}")

    def wait_ready(self, timeout_s: float, show: Callable[[str], None]) -> float:
        """Wait until /health answers.

        Args:
            timeout_s: How long that may take, from the start of the process.
            show: Told a few times a second what the log said last.

        Returns:
            Seconds since the process was started.

        Raises:
            BenchError: It ended.
            OutOfTimeError: It was not ready in time.
        """
        assert self._process is not None, "the server was not started"
        while (seconds := time.monotonic() - self._started) < timeout_s:
            if (code := self._process.poll()) is not None:
                raise BenchError(f"the server ended with status {code} after {seconds:.0f} s, before it was ready")
            if self._healthy():
                return time.monotonic() - self._started
            show(self._last_message())
            time.sleep(_POLL_S)
        raise OutOfTimeError(f"the server was not ready after {timeout_s:.0f} s")

    def ask(self, path: str, body: bytes, content_type: str, timeout_s: float) -> float:
        """Send a request and read all of the answer; return the seconds that took.

        Raises:
            BenchError: The answer is an error, or there is none.
            OutOfTimeError: It took longer than it was given.
        """
        start = time.perf_counter()
        self.answer(path, body, content_type, timeout_s)
        return time.perf_counter() - start

    def answer(self, path: str, body: bytes, content_type: str, timeout_s: float) -> bytes:
        """Send a request and return the answer.

        Raises:
            BenchError: The answer is an error, or there is none.
            OutOfTimeError: It took longer than it was given.
        """
        try:
            with urllib.request.urlopen(self._request(path, body, content_type), timeout=timeout_s) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            raise BenchError(f"{path} answered {error.code}, expected 200: {_message(error.read())}") from None
        except TimeoutError:
            raise OutOfTimeError(f"{path} gave no answer within {timeout_s:.0f} s") from None
        except (OSError, http.client.HTTPException) as error:
            if isinstance(getattr(error, "reason", None), TimeoutError):
                raise OutOfTimeError(f"{path} gave no answer within {timeout_s:.0f} s") from None
            raise BenchError(
                f"{path} gave no answer: {getattr(error, 'reason', error) or type(error).__name__}"
            ) from None

    def metrics(self) -> str:
        """Return what /metrics says; nothing if the server has no metrics."""
        return self._get("/metrics")

    def document(self, path: str) -> Any:
        """Return a JSON document of the server; None if it has none."""
        try:
            return json.loads(self._get(path))
        except ValueError:
            return None

    def tail(self, lines: int = _TAIL_LINES) -> str:
        """Return the last lines of the log."""
        return "\n".join(self._log_lines()[-lines:])

    def logged(self, pattern: re.Pattern[str]) -> list[str]:
        """Return the first group of each line of the log that has the pattern, without repetitions."""
        return list(dict.fromkeys(match[1] for line in self._log_lines() if (match := pattern.search(line))))

    def _get(self, path: str) -> str:
        try:
            with urllib.request.urlopen(self._request(path), timeout=30) as answer:
                return str(answer.read().decode())
        except (OSError, http.client.HTTPException, UnicodeDecodeError):
            return ""

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (OSError, http.client.HTTPException):  # nobody listens yet, or says that it is not
            return False

    def _request(self, path: str, body: bytes | None = None, content_type: str = "") -> urllib.request.Request:
        key = os.environ.get(_API_KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return urllib.request.Request(
            self.url + path, data=body, headers=headers | ({"Content-Type": content_type} if content_type else {})
        )

    def _log_lines(self) -> list[str]:
        return _ESCAPES.sub("", self._log.read_text(errors="replace")).splitlines() if self._log.exists() else []

    def _last_message(self) -> str:
        messages = (match[1] for line in reversed(self._log_lines()) if (match := _LOG_LINE.search(line)))
        return next(messages, "starting")

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(dir=self._working, prefix="", ignore_cleanup_errors=True)
        # torch keeps its precompiled C++ headers below the temporary folder, wherever its cache is.
        for variable, name in {"VLLM_CACHE_ROOT": "vllm", "TMPDIR": "tmp"}.items() if self._private_caches else ():
            folder = Path(self._folder.name, name)
            folder.mkdir(mode=0o700)
            self.environment[variable] = str(folder)
        left_out = _CACHE_VARIABLES if self._private_caches else ()
        inherited = {name: value for name, value in os.environ.items() if name not in left_out}
        self._started = time.monotonic()
        with open(self._log, "wb", opener=_private) as log:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**inherited, **self.environment},
                start_new_session=True,
            )
        self._session = Session(self._process)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, mode=0o600)


def _message(answer: bytes) -> str:
    """Take the message out of an error in OpenAI's form, or in FastAPI's."""
    try:
        error = json.loads(answer)
        return str(error["error"]["message"] if "error" in error else error["detail"])[:500]
    except (ValueError, KeyError, TypeError):
        return answer[:200].decode(errors="replace") or "nothing"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
