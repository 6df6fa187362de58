"""A compiled callable that can become its eager self."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from vllm_omni_diffusion_compile.compile.events import record_compilations
from vllm_omni_diffusion_compile.compile.fallback import FallbackCallable, compile_with_fallback
from vllm_omni_diffusion_compile.compile.latch import Failure, Latch, first_line


class Report:
    """Records what a latch or `compile_with_fallback` tells."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []

    def __call__(self, told: Exception | Failure) -> None:
        error = told.error if isinstance(told, Failure) else told
        assert error is not None
        self.errors.append(error)


def latch(report: Report | None = None, **options: Any) -> Latch:
    return Latch("vae.decode", report or Report(), **options)


def failing(error: BaseException, calls: list[str]) -> Callable[..., Any]:
    def compiled(*_: Any, **__: Any) -> Any:
        calls.append("compiled")
        raise error

    return compiled


def test_a_call_that_works_is_the_compiled_one() -> None:
    report = Report()
    call = FallbackCallable(lambda x: ("eager", x), lambda x: ("compiled", x), latch(report))
    assert call(3) == ("compiled", 3)
    assert report.errors == []


def test_the_compilers_fault_makes_it_eager_for_good() -> None:
    calls: list[str] = []
    report = Report()
    call = FallbackCallable(lambda x: x + 1, failing(RuntimeError("no g++\nsecond line"), calls), latch(report))
    assert [call(1), call(2), call(3)] == [2, 3, 4]
    assert calls == ["compiled"]
    assert call.latched
    assert [first_line(error) for error in report.errors] == ["no g++"]


def test_an_error_of_the_call_itself_propagates_and_latches_nothing() -> None:
    calls: list[str] = []
    report = Report()

    def eager(value: int) -> int:
        raise ValueError(f"bad latent {value}")

    call = FallbackCallable(eager, failing(RuntimeError("wrapped"), calls), latch(report))
    for value in (1, 2):
        with pytest.raises(ValueError, match=f"bad latent {value}"):
            call(value)
    assert calls == ["compiled", "compiled"]
    assert not call.latched
    assert report.errors == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), GeneratorExit()])
def test_interrupts_pass_through_untried(error: BaseException) -> None:
    eager_calls: list[int] = []
    report = Report()
    call = FallbackCallable(eager_calls.append, failing(error, []), latch(report))
    with pytest.raises(type(error)):
        call(1)
    assert eager_calls == []
    assert not call.latched


def test_errors_that_are_no_failure_pass_through_untried() -> None:
    class Aborted(Exception):
        pass

    eager_calls: list[int] = []
    call = FallbackCallable(eager_calls.append, failing(Aborted("by the client"), []), latch(passes_through=(Aborted,)))
    with pytest.raises(Aborted):
        call(1)
    assert eager_calls == []
    assert not call.latched


class Cached:
    """A decode like Wan's: it fills a cache on the module and moves an index, frame by frame."""

    def __init__(self) -> None:
        self.feat_cache: list[int | None] = [None, None, None]
        self.feat_idx = [0]
        self.frames = 0

    def decode(self, fail_at: int | None = None) -> list[int | None]:
        for frame in range(3):
            if frame == fail_at:
                raise RuntimeError("backend failed in the middle")
            self.feat_cache[self.feat_idx[0]] = frame
            self.feat_idx[0] += 1
            self.frames += 1
            self.late = True
        return list(self.feat_cache)


def test_mutable_state_is_what_it_was_when_eager_runs() -> None:
    vae = Cached()
    cache, index = vae.feat_cache, vae.feat_idx

    def compiled() -> list[int | None]:
        return vae.decode(fail_at=2)

    call = FallbackCallable(vae.decode, compiled, latch())
    # Without the restore, eager would start at index 2 and run off the end of the cache.
    assert call() == [0, 1, 2]
    assert vae.frames == 3
    assert vae.feat_cache is cache and vae.feat_idx is index


def test_a_cache_among_the_arguments_is_restored_too() -> None:
    def decode(frame: int, feat_cache: list[list[int]], feat_idx: dict[str, int]) -> int:
        feat_cache[0].append(frame)
        feat_idx["at"] = feat_idx.get("at", 0) + 1
        return len(feat_cache[0])

    def compiled(*args: Any, **kwargs: Any) -> int:
        decode(*args, **kwargs)
        raise RuntimeError("after the cache was written")

    feat_cache, feat_idx = [[7]], {"at": 4}
    call = FallbackCallable(decode, compiled, latch())
    assert call(1, feat_cache, feat_idx=feat_idx) == 2
    assert feat_cache == [[7, 1]]
    assert feat_idx == {"at": 5}


def test_two_threads_that_fail_at_once_get_results_and_one_report() -> None:
    both = threading.Barrier(2, timeout=10)
    report = Report()

    def compiled(x: int) -> int:
        both.wait()
        raise RuntimeError("both at once")

    call = FallbackCallable(lambda x: x * 2, compiled, latch(report))
    results: dict[int, int] = {}
    threads = [threading.Thread(target=lambda n=n: results.update({n: call(n)})) for n in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert results == {1: 2, 2: 4}
    assert len(report.errors) == 1


def test_threads_that_fail_with_state_do_not_undo_each_others_eager_run() -> None:
    class Lazy:
        mean: int

        def decode(self, x: int) -> int:
            if not hasattr(self, "mean"):
                self.mean = 10
            time.sleep(0.02)
            return self.mean + x

    both = threading.Barrier(2, timeout=10)

    def compiled(x: int) -> int:
        both.wait()
        time.sleep(0.01 * x)
        raise RuntimeError("both at once")

    call = FallbackCallable(Lazy().decode, compiled, latch())
    results: dict[int, object] = {}

    def run(x: int) -> None:
        try:
            results[x] = call(x)
        except Exception as error:
            results[x] = error

    threads = [threading.Thread(target=run, args=(x,)) for x in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert results == {1: 11, 2: 12}


def test_a_cache_that_appears_late_is_seen() -> None:
    class Late:
        def __init__(self) -> None:
            self.feat_cache: list[int] | None = None

        def decode(self, x: int) -> int:
            self.feat_cache = self.feat_cache or []
            self.feat_cache.append(x)
            return len(self.feat_cache)

    vae = Late()
    outcome: list[bool] = []

    def compiled(x: int) -> int:
        length = vae.decode(x)
        if outcome:
            raise RuntimeError("the second call fails, after it wrote")
        outcome.append(True)
        return length

    call = FallbackCallable(vae.decode, compiled, latch())
    assert [call(1), call(2)] == [1, 2]
    assert vae.feat_cache == [1, 2]


def test_nothing_is_compiled_while_it_is_held() -> None:
    calls: list[str] = []
    held = [True]
    call = FallbackCallable(
        lambda: calls.append("eager"), lambda: calls.append("compiled"), latch(), hold=lambda: held[0]
    )
    call()
    held[0] = False
    call()
    assert calls == ["eager", "compiled"]


def test_a_copy_of_the_component_decodes_eagerly() -> None:
    class Vae:
        scale = 2
        decode: Any

        def eager(self, x: int) -> int:
            return x * self.scale

    vae = Vae()
    vae.decode = FallbackCallable(vae.eager, lambda x: -1, latch())
    twin = copy.deepcopy(vae)
    twin.scale = 3
    assert (vae.decode(2), twin.decode(2)) == (-1, 6)


@pytest.mark.parametrize("wrapped", [False, True], ids=["as raised", "as Dynamo wraps it"])
def test_out_of_memory_frees_what_the_failed_call_held_before_eager_runs(
    monkeypatch: pytest.MonkeyPatch, wrapped: bool
) -> None:
    held: list[weakref.ref[torch.Tensor]] = []
    events: list[str] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: events.append("emptied"))

    def compiled() -> str:
        activation = torch.ones(8)
        held.append(weakref.ref(activation))
        if wrapped:
            raise RuntimeError("backend failed") from torch.OutOfMemoryError("CUDA out of memory")
        raise torch.OutOfMemoryError("CUDA out of memory")

    def eager() -> str:
        events.append(f"eager, activation alive: {held[0]() is not None}")
        return "picture"

    call = FallbackCallable(eager, compiled, latch())
    gc.disable()
    try:
        assert call() == "picture"
    finally:
        gc.enable()
    assert events == ["emptied", "eager, activation alive: False"]


def test_signature_and_name_stay_those_of_the_original() -> None:
    def decode(z: torch.Tensor, return_dict: bool = True) -> torch.Tensor:
        return z

    call, activated = compile_with_fallback(
        decode, latch(), on_setup_failure=Report(), compile_options={"backend": "eager"}
    )
    assert activated
    assert inspect.signature(call) == inspect.signature(decode)
    assert call.__name__ == "decode"


def test_a_failing_set_up_leaves_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no such mode")

    monkeypatch.setattr(torch, "compile", refuse)
    report = Report()

    def decode() -> None:
        return None

    assert compile_with_fallback(decode, latch(), on_setup_failure=report, compile_options={}) == (decode, False)
    assert [str(error) for error in report.errors] == ["no such mode"]


def test_a_backend_that_fails_in_the_real_compiler_is_survived() -> None:
    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        raise NotImplementedError("this backend cannot do anything")

    report = Report()
    call, _ = compile_with_fallback(
        lambda x: x * 2 + 1, latch(report), on_setup_failure=report, compile_options={"backend": backend}
    )
    assert torch.equal(call(torch.ones(3)), torch.full((3,), 3.0))
    assert len(report.errors) == 1
    assert "cannot do anything" in str(report.errors[0])


@pytest.mark.skipif(
    "recompile_limit" not in inspect.signature(torch.compile).parameters,
    reason="before torch 2.12 it is no option of torch.compile but the process's, which the contract test has",
)
def test_a_recompile_limit_of_its_own_holds_above_what_torch_compiles_of_any_code() -> None:
    with torch._dynamo.config.patch(accumulated_recompile_limit=2):
        call, _ = compile_with_fallback(
            lambda x: x.cos() + 1,
            latch(),
            on_setup_failure=Report(),
            on_compile=functools.partial(record_compilations, "vae", "decode"),
            compile_options={"backend": "eager", "dynamic": False, "recompile_limit": 5},
        )
        assert isinstance(call, FallbackCallable)
        for rows in range(2, 9):
            call(torch.ones(rows))
        assert torch._dynamo.config.accumulated_recompile_limit == 2
    assert call.graphs == 5


def test_graphs_counts_what_was_compiled_in_its_calls() -> None:
    call, _ = compile_with_fallback(
        lambda x: x.sin() + 1,
        latch(),
        on_setup_failure=Report(),
        on_compile=functools.partial(record_compilations, "vae", "decode"),
        compile_options={"backend": "eager", "dynamic": False},
    )
    assert isinstance(call, FallbackCallable)
    call(torch.ones(3))
    assert call.graphs == 1
    call(torch.ones(3))
    assert call.graphs == 1
    call(torch.ones(4))
    assert call.graphs == 2
