"""The thread that a worker of this process computes in once it was warmed."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from vllm_omni_diffusion_compile.upstream.serving_thread import ask_in_its_thread, warm_where_it_serves


class Activations:
    """What a request has in its hands when it fails."""


class Executor:
    """Computes in the thread that asks, as the host's executor with a worker in this process does."""

    def __init__(self) -> None:
        self.driver_worker: Activations | None = Activations()
        self.last: weakref.ref[Activations] = weakref.ref(self.driver_worker)
        self.go_on = threading.Event()

    def rpc(self, method: str) -> threading.Thread:
        if method == "fails":
            activations = Activations()
            self.last = weakref.ref(activations)
            raise ValueError("a request of its own")
        if method == "nested":
            return ask(self, "where")
        if method == "waits":
            assert self.go_on.wait(timeout=10)
        return threading.current_thread()


ask: Callable[[Executor, str], threading.Thread] = ask_in_its_thread(Executor.rpc)


def warmed() -> Executor:
    executor = Executor()
    warm_where_it_serves(SimpleNamespace(executor=executor))
    return executor


def in_a_new_thread(executor: Executor, method: str = "where") -> threading.Thread:
    answers: list[threading.Thread] = []
    asks = threading.Thread(target=lambda: answers.append(ask(executor, method)))
    asks.start()
    asks.join(timeout=10)
    return answers[0]


def test_a_worker_that_was_not_warmed_computes_where_it_is_asked() -> None:
    assert ask(Executor(), "where") is threading.current_thread()


def test_whoever_asks_one_thread_computes_once_it_was_warmed() -> None:
    executor = warmed()
    thread = ask(executor, "where")
    assert thread is not threading.current_thread()
    assert in_a_new_thread(executor) is thread
    warm_where_it_serves(SimpleNamespace(executor=executor))  # of further sizes
    assert ask(executor, "where") is thread


def test_what_it_asks_itself_for_does_not_wait_for_itself() -> None:
    executor = warmed()
    assert in_a_new_thread(executor, "nested") is ask(executor, "where")


def test_what_it_raises_is_raised_where_it_was_asked_for_and_it_goes_on() -> None:
    executor = warmed()
    with pytest.raises(ValueError, match="a request of its own"):
        ask(executor, "fails")
    assert ask(executor, "where").is_alive()


def test_what_failed_leaves_nothing_behind_that_only_garbage_collection_finds() -> None:
    executor = warmed()
    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            ask(executor, "fails")
        deadline = time.monotonic() + 10  # the thread lets go of it in a moment of its own
        while executor.last() is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert executor.last() is None
    finally:
        gc.enable()


def test_the_thread_ends_with_its_worker_and_nobody_waits_for_it_then() -> None:
    executor = warmed()
    thread = ask(executor, "where")
    executor.driver_worker = None  # as after a shutdown
    thread.join(timeout=10)
    assert not thread.is_alive()
    assert ask(executor, "where") is threading.current_thread()


def test_who_asks_while_the_thread_is_told_to_end_is_answered() -> None:
    executor = warmed()
    asking = [threading.Thread(target=ask, args=(executor, method), daemon=True) for method in ("waits", "where")]
    asking[0].start()
    time.sleep(0.05)
    executor.driver_worker = None  # the word to end stands before what is asked for next
    asking[1].start()
    time.sleep(0.05)
    executor.go_on.set()
    for thread in asking:
        thread.join(timeout=10)
        assert not thread.is_alive()


def test_workers_in_processes_of_their_own_are_left_alone() -> None:
    executor = SimpleNamespace(processes=[])
    warm_where_it_serves(SimpleNamespace(executor=executor))
    assert vars(executor) == {"processes": []}
