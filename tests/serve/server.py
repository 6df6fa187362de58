"""A real `vllm serve --omni` as a context manager."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import httpx
import psutil

if TYPE_CHECKING:
    from typing_extensions import Self

READY_TIMEOUT_S = 240.0
REQUEST_TIMEOUT_S = 240.0
# vLLM-Omni takes up to 5 s to wind down an idle server.
STOP_TIMEOUT_S = 20.0
LOG_TAIL_LINES = 60


class Server:
    """A server of the environment that runs the tests, in a process group of its own.

        with Server(checkpoint, "--enforce-eager", plugins="diffusion_cpu,vllm_omni_register_models") as server:
            (picture,) = server.images("a cat", size="128x128", num_inference_steps=2, seed=1)

    It starts with empty caches, so that what it compiles does not depend on what ran before, and without the network.

    Args:
        model: Folder of the checkpoint.
        options: Further options of `vllm serve`.
        plugins: Value of VLLM_PLUGINS; None loads every installed plugin.
        env: Further environment variables; they win over those set here.
        caches: Folder that holds the caches, for a test of warm ones; None makes a fresh one.
        ready_timeout_s: How long the start may take.

    Attributes:
        port: Where it listens.
        startup_s: From the start of the process to the first answer of /health.
    """

    def __init__(
        self,
        model: Path,
        *options: str,
        plugins: str | None = None,
        env: Mapping[str, str] | None = None,
        caches: Path | None = None,
        ready_timeout_s: float = READY_TIMEOUT_S,
    ) -> None:
        self.port = _free_port()
        self.startup_s = 0.0
        self._ready_timeout_s = ready_timeout_s
        self._folder = tempfile.TemporaryDirectory(prefix="serve-test-", ignore_cleanup_errors=True)
        self._log_file = Path(self._folder.name) / "server.log"
        self._command = [
            str(Path(sys.executable).with_name("vllm")),
            *("serve", str(model), "--omni", "--host", "127.0.0.1", "--port", str(self.port)),
            # A busy machine compiles for longer than vLLM-Omni waits for a stage.
            *(f"--stage-init-timeout={ready_timeout_s:.0f}", f"--init-timeout={ready_timeout_s:.0f}", *options),
        ]
        self._env = _environment(caches or Path(self._folder.name) / "caches", plugins) | dict(env or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=REQUEST_TIMEOUT_S)

    def __enter__(self) -> Self:
        self.start()
        try:
            self.wait_ready(self._ready_timeout_s)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            print(f"--- log of the server ---\n{self.tail()}", file=sys.stderr)
        self.stop()

    @property
    def pid(self) -> int:
        """Process id of the server's first process, which is also the id of its process group."""
        assert self._process is not None, "the server was not started"
        return self._process.pid

    @property
    def log(self) -> str:
        """Everything that the server's processes printed so far."""
        return self._log_file.read_text(errors="replace") if self._log_file.exists() else ""

    def tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """Return the last lines of the log."""
        return "\n".join(self.log.splitlines()[-lines:])

    def start(self) -> None:
        """Start the process and returns at once."""
        _undo_ignored_interrupt()
        with self._log_file.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                cwd=self._folder.name,
                start_new_session=True,
            )

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until /health answers.

        Raises:
            RuntimeError: The process died.
            TimeoutError: It lives, and did not get ready in time.
        """
        assert self._process is not None, "the server was not started"
        started = time.monotonic()
        while time.monotonic() - started < timeout_s:
            code = self._process.poll()
            if code is not None:
                raise RuntimeError(f"{self._described()} ended with status {code} while starting:\n{self.tail()}")
            try:
                if self._client.get("/health", timeout=2).status_code == 200:
                    self.startup_s = time.monotonic() - started
                    return
            except httpx.TransportError:
                # Nobody listens yet.
                pass
            time.sleep(0.2)
        raise TimeoutError(f"{self._described()} was not ready after {timeout_s:.0f} s:\n{self.tail()}")

    def get(self, path: str, **options: Any) -> httpx.Response:
        """Send a GET request; the answer may have any status."""
        return self._client.get(path, **options)

    def post(self, path: str, **options: Any) -> httpx.Response:
        """Send a POST request; the answer may have any status."""
        return self._client.post(path, **options)

    def images(self, prompt: str, **parameters: Any) -> list[bytes]:
        """Have images made and returns them as PNG files.

        Args:
            prompt: What to draw.
            parameters: Further fields of the request: size, num_inference_steps, seed, n, ...
        """
        answer = self._checked(self.post("/v1/images/generations", json={"prompt": prompt} | parameters))
        return [base64.b64decode(image["b64_json"]) for image in answer.json()["data"]]

    def videos(self, prompt: str, *, keyframes: Sequence[bytes] = (), **parameters: Any) -> bytes:
        """Have a video made and returns it as an MP4 file.

        Args:
            prompt: What to film.
            keyframes: PNG files: none, the first frame, or the first and the last one.
            parameters: Further fields of the form: size, num_inference_steps, seed, seconds, extra_params, ...
        """
        return self.video_response(prompt, keyframes=keyframes, **parameters).content

    def video_response(self, prompt: str, *, keyframes: Sequence[bytes] = (), **parameters: Any) -> httpx.Response:
        """As `videos`, with the headers, which carry time and peak memory."""
        form = {
            name: json.dumps(value) if isinstance(value, (dict, list)) else str(value)
            for name, value in ({"prompt": prompt} | parameters).items()
        }
        if keyframes:
            urls = [f"data:image/png;base64,{base64.b64encode(image).decode()}" for image in keyframes]
            form["image_reference"] = json.dumps([{"image_url": url} for url in urls])
        # As files without a name, so that the form is sent as multipart whether or not it carries one.
        return self._checked(self.post("/v1/videos/sync", files={name: (None, value) for name, value in form.items()}))

    def processes(self) -> list[psutil.Process]:
        """Return the living processes of the server's group."""
        found = []
        for process in psutil.process_iter():
            try:
                if os.getpgid(process.pid) == self.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
        return found

    def left_behind(self, within_s: float = 10.0) -> list[list[str]]:
        """Return the command lines of the group's processes that outlive the server by more than a moment.

        A worker of the compiler or a resource tracker ends when its pipe does, which takes a busy machine a second.
        """
        deadline = time.monotonic() + within_s
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        commands = []
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                commands.append(process.cmdline())
        return commands

    def interrupt(self) -> int | None:
        """Send SIGINT as a terminal would; returns the exit status, or None if the server did not end in time."""
        assert self._process is not None, "the server was not started"
        if self._process.poll() is None:
            # An open connection keeps the server waiting.
            self._client.close()
            os.kill(self.pid, signal.SIGINT)
        return self.wait(STOP_TIMEOUT_S)

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the server to end; returns its exit status, or None if it did not."""
        assert self._process is not None, "the server was not started"
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> None:
        """End the server, and whatever of its process group outlives it.

        Raises:
            RuntimeError: A process of the group is still there.
        """
        if self._process is None:
            return
        try:
            self.interrupt()
            self._kill_group()
        finally:
            self._client.close()
            self._process = None
            self._folder.cleanup()

    def _kill_group(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + 10
        while left := self.processes():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self._described()} left processes behind: {left}")
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.poll()
            time.sleep(0.1)
        self._process.wait(1)

    def _checked(self, answer: httpx.Response) -> httpx.Response:
        if answer.status_code != 200:
            raise RuntimeError(
                f"{answer.request.url} answered {answer.status_code}, expected 200:\n"
                f"{answer.text[:2000]}\n{self.tail()}"
            )
        return answer

    def _described(self) -> str:
        return " ".join(self._command[1:])


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _environment(caches: Path, plugins: str | None) -> dict[str, str]:
    env = dict(os.environ)
    for name in ("VLLM_PLUGINS", "TORCHINDUCTOR_CACHE_DIR"):
        env.pop(name, None)
    env |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(caches / "vllm"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        # Code of a checkpoint is copied there and would be found again after the checkpoint has changed.
        "HF_MODULES_CACHE": str(caches / "modules"),
    }
    if plugins is not None:
        env["VLLM_PLUGINS"] = plugins
        if "diffusion_compile" not in plugins.split(","):  # which has a cache of its own, within vLLM's
            env["TORCHINDUCTOR_CACHE_DIR"] = str(caches / "inductor")
    return env


def _undo_ignored_interrupt() -> None:
    """A test run in the background of a shell script ignores SIGINT, and its children inherit that."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
