"""A compiled callable that can become its eager self.

The rule for a call that fails: run it eagerly. If eager succeeds, the compiler was at fault, and the callable stays
eager for good. If eager raises too, the error is the call's own: it propagates, and the next call tries the compiled
callable again.
"""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._dynamo.utils import counters  # see events.py; read in place, since this runs at every call

from vllm_omni_diffusion_compile.compile.latch import Latch, chain, without_frames
from vllm_omni_diffusion_compile.compile.limit import with_room_for
from vllm_omni_diffusion_compile.compile.numbers import NUMBERS
from vllm_omni_diffusion_compile.compile.ranks import RankGroup
from vllm_omni_diffusion_compile.compile.state import CallState, State, restore
from vllm_omni_diffusion_compile.errors import RankFailedError

# Told how many frames torch looked at in a call, and the call's arguments; returns how many graphs it compiled.
OnCompile = Callable[[int, tuple[Any, ...], Mapping[str, Any]], int]


class FallbackCallable:
    """Calls `compiled` until a call fails for the compiler's fault, from then on `eager`.

    Safe to call from several threads.

    Args:
        eager: The original callable; the new one carries its name and signature.
        compiled: What `torch.compile` returned for it.
        latch: Closed by the failure; shared by all callables that the same failure would meet.
        on_compile: See above; called after a call in which torch compiled, or tried to.
        hold: Asked before a call as long as nothing was compiled in one: whether to run it eagerly for now.
        state: What is put back before a retry; None for what the owner of `eager` keeps, which may be caches that a
            failed call leaves half written, as those of video VAEs.
        fails_closed: Raise what a compiled call raises instead of trying it eagerly; not with `ranks`, which would be
            left waiting, and have a way of their own to raise it.
        ranks: The ranks that run this together, if it is more than one.
    """

    def __init__(  # noqa: PLR0913 - each switches one thing, by name
        self,
        eager: Callable[..., Any],
        compiled: Callable[..., Any],
        latch: Latch,
        *,
        on_compile: OnCompile | None = None,
        hold: Callable[[], bool] | None = None,
        state: State | None = None,
        fails_closed: bool = False,
        ranks: RankGroup | None = None,
    ) -> None:
        functools.update_wrapper(self, eager)
        self._eager = eager
        self._compiled = compiled
        self._latch = latch
        self._on_compile = on_compile
        self._hold = hold
        self._fails_closed = fails_closed
        self._ranks = ranks
        self._capture = (state or CallState(eager)).capture
        self._failing = threading.RLock()

    @property
    def latched(self) -> bool:
        """Whether every call runs eagerly now."""
        return self._latch.closed

    @property
    def graphs(self) -> int:
        """Graphs compiled in calls of this and of what shares its latch."""
        return self._latch.graphs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what is in use now; see the rule at the top of this module."""
        latch = self._latch
        if latch.closed:
            return self._eager(*args, **kwargs)
        if not latch.graphs:
            if self._hold is not None and self._hold():
                return self._eager(*args, **kwargs)
            NUMBERS.look_at_arguments(args, kwargs)
        before = self._capture(args, kwargs)
        sent = self._ranks.sent() if self._ranks is not None else (0, 0)
        frames = counters["frames"]["total"]
        try:
            return self._compiled(*args, **kwargs)
        except latch.passes_through:
            raise
        except RankFailedError:
            raise
        except Exception as error:
            if self._fails_closed:
                raise
            if self._ranks is not None:
                first_frame = not latch.graphs and counters["frames"]["total"] == frames + 1
                if self._ranks.may_have_communicated(sent, first_frame=first_frame):
                    raise self._ranks.failed_midway(latch, error) from error
            out_of_memory = any(isinstance(link, torch.OutOfMemoryError) for link in chain(error))
            failure = without_frames(error)
        finally:
            if (looked_at := counters["frames"]["total"] - frames) > 0 and self._on_compile is not None:
                latch.graphs += self._on_compile(looked_at, args, kwargs)
        # Outside of the except block, so that nothing keeps the tensors of the failed call alive while eager runs.
        # One thread at a time: what one puts back, another one's eager run may just have written.
        with self._failing:
            restore(before)
            if out_of_memory:
                empty_cache()
            result = self._eager(*args, **kwargs)
        latch.close(failure)
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is the eager callable: what was compiled belongs to this process and this module."""
        return itself, (self._eager,)


def compile_with_fallback(
    function: Callable[..., Any],
    latch: Latch,
    *,
    on_setup_failure: Callable[[Exception], None],
    compile_options: Mapping[str, Any],
    fails_closed: bool = False,
    **options: Any,
) -> tuple[Callable[..., Any], bool]:
    """Compile a callable so that the compiler cannot take a request down.

    Args:
        function: What to compile.
        latch: See `FallbackCallable`.
        on_setup_failure: Told the error when `torch.compile` itself raises.
        compile_options: Handed to `torch.compile`.
        fails_closed: See `FallbackCallable`; what `torch.compile` itself raises is raised too.
        **options: Handed to `FallbackCallable`.

    Returns:
        The callable to use from now on, and whether it is compiled; the original one if setting up failed.
    """
    try:
        compiled = torch.compile(function, **compile_options)
    except Exception as error:  # whatever a backend raises while it is set up, eager is there
        if fails_closed:
            raise
        on_setup_failure(error)
        return function, False
    compiled = with_room_for(compile_options.get("recompile_limit"), compiled)
    return FallbackCallable(function, compiled, latch, fails_closed=fails_closed, **options), True


def itself(value: Any) -> Any:
    """Return it: what a copy of a compiled callable is made with."""
    return value


def empty_cache() -> None:
    """Give back what the accelerator's allocator holds and nobody uses."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
