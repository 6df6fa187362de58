"""One thread that computes, for warmup requests and for those of users.

Torch keeps by thread what it has found out about a shape: the execution plans of cuDNN's convolutions, which take
milliseconds each, and the team of OpenMP's threads. vLLM-Omni computes in whatever thread asks, and serves in one that
begins with the first user's request, so what a worker in this process was warmed with is found out once more, at every
shape. Once it is warmed here, one thread does all that its worker is asked for.

Workers in processes of their own are not concerned: there one thread does everything.

Sources: `BenchmarkCache` of ATen's `Conv_v8.cpp`; `DiffusionEngine._check_and_start_background_loop`.
"""

from __future__ import annotations

import functools
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

_NAME = "diffusion-compile-worker"
# On an executor: its thread.
_THREAD = "_diffusion_compile_thread"

_Task = tuple[Callable[[], Any], "Future[Any]"]


class ServingThread:
    """Does one thing after the other in one thread, which begins as new as one that the host would have begun."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        # So that nothing is handed to a thread that has looked for the last time.
        self._handing = threading.Lock()
        self._ended = False
        # A daemon: a warmup request that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name=_NAME, daemon=True)
        self._thread.start()

    def do(self, what: Callable[[], Any]) -> Any:
        """Have something done after what was asked for before, and return what it returns.

        Raises:
            BaseException: What it raised.
        """
        if threading.current_thread() is self._thread:  # a part of what the thread is doing
            return what()
        future: Future[Any] = Future()
        with self._handing:
            ended = self._ended
            if not ended:
                self._tasks.put((what, future))
        if ended:
            return what()
        try:
            return future.result()
        finally:
            # Else an error would hold this frame, and this frame the error with all that the worker had in its hands.
            del future

    def end(self) -> None:
        """Have the thread end after what was asked for; what is asked for once it has is done where it is asked for."""
        self._tasks.put(None)  # takes no lock: the garbage collector calls this, from wherever it runs

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            _do(*task)
            del task  # and with it the worker, while there is nothing to do
        with self._handing:
            self._ended = True
        while not self._tasks.empty():  # what was handed over after the word to end
            if (task := self._tasks.get()) is not None:
                _do(*task)


def _do(what: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(what())
    except BaseException as error:  # noqa: BLE001 - raised in the thread that asked
        future.set_exception(error)
    finally:
        del what, future  # the error holds this frame


def warm_where_it_serves(engine: Any) -> None:
    """Have what the engine's worker is asked for from now on done by one thread, if that worker is in this process."""
    executor = getattr(engine, "executor", None)
    worker = getattr(executor, "driver_worker", None)
    if worker is None or hasattr(executor, _THREAD):
        return
    thread = ServingThread()
    setattr(executor, _THREAD, thread)
    # An executor that was shut down has let go of its worker.
    weakref.finalize(worker, thread.end).atexit = False


def ask_in_its_thread(collective_rpc: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collective_rpc)
    def in_its_thread(self: Any, *args: Any, **kwargs: Any) -> Any:
        thread: ServingThread | None = getattr(self, _THREAD, None)
        if thread is None:
            return collective_rpc(self, *args, **kwargs)
        return thread.do(functools.partial(collective_rpc, self, *args, **kwargs))

    return in_its_thread
