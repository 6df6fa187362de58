"""A compiled callable that can become its eager self.

The rule for a call that fails: run it eagerly. If eager succeeds, the compiler was at fault, and the callable stays
eager for good. If eager raises too, the error is the call's own: it propagates, and the next call tries the compiled
callable again.
"""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo.utils import counters  # see events.py; read in place, since this runs at every call

from vllm_omni_diffusion_compile.compile.state import CallState, restore


class FallbackCallable:
    """Calls `compiled` until a call fails for the compiler's fault, from then on `eager`.

    Safe to call from several threads.

    Attributes:
        graphs: Graphs compiled during calls of this callable.

    Args:
        eager: The original callable; the new one carries its name and signature.
        compiled: What `torch.compile` returned for it.
        on_fallback: Told the error, once, after eager gave a result that compiled did not.
        passes_through: Errors that are no failure of the call (an aborted request, a client error). They are raised as
            they are and nothing is tried again; KeyboardInterrupt and other BaseExceptions always are.
        hold: Asked before a call as long as nothing was compiled in one: whether to run it eagerly for now.
    """

    def __init__(
        self,
        eager: Callable[..., Any],
        compiled: Callable[..., Any],
        *,
        on_fallback: Callable[[Exception], None],
        passes_through: tuple[type[BaseException], ...] = (),
        hold: Callable[[], bool] | None = None,
    ) -> None:
        functools.update_wrapper(self, eager)
        self.graphs = 0
        self._eager = eager
        self._compiled: Callable[..., Any] | None = compiled
        self._on_fallback = on_fallback
        self._passes_through = passes_through
        self._hold = hold
        self._capture = CallState(eager).capture
        self._failing = threading.RLock()

    @property
    def latched(self) -> bool:
        """Whether every call runs eagerly now."""
        return self._compiled is None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what is in use now; see the rule at the top of this module."""
        compiled = self._compiled
        if compiled is None:
            return self._eager(*args, **kwargs)
        if not self.graphs and self._hold is not None and self._hold():
            return self._eager(*args, **kwargs)
        before = self._capture(args, kwargs)
        graphs = counters["stats"]["unique_graphs"]
        try:
            return compiled(*args, **kwargs)
        except self._passes_through:
            raise
        except Exception as error:  # noqa: BLE001 - eager decides whose fault it was
            out_of_memory = any(isinstance(link, torch.OutOfMemoryError) for link in _chain(error))
            failure = _without_frames(error)
        finally:
            if (now := counters["stats"]["unique_graphs"]) != graphs:
                self.graphs += now - graphs
        # Outside of the except block, so that nothing keeps the tensors of the failed call alive while eager runs.
        # One thread at a time: what one puts back, another one's eager run may just have written.
        with self._failing:
            restore(before)
            if out_of_memory:
                _empty_cache()
            result = self._eager(*args, **kwargs)
            first, self._compiled = self._compiled is not None, None
        if first:
            self._on_fallback(failure)
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is the eager callable: what was compiled belongs to this process and this module."""
        return _itself, (self._eager,)


def compile_with_fallback(
    function: Callable[..., Any],
    *,
    on_setup_failure: Callable[[Exception], None],
    on_fallback: Callable[[Exception], None],
    passes_through: tuple[type[BaseException], ...] = (),
    hold: Callable[[], bool] | None = None,
    **compile_options: Any,
) -> tuple[Callable[..., Any], bool]:
    """Compile a callable so that the compiler cannot take a request down.

    Args:
        function: What to compile.
        on_setup_failure: Told the error when `torch.compile` itself raises.
        on_fallback: See `FallbackCallable`.
        passes_through: See `FallbackCallable`.
        hold: See `FallbackCallable`.
        **compile_options: Handed to `torch.compile`.

    Returns:
        The callable to use from now on, and whether it is compiled; the original one if setting up failed.
    """
    try:
        compiled = torch.compile(function, **compile_options)
    except Exception as error:  # noqa: BLE001 - whatever a backend raises while it is set up, eager is there
        on_setup_failure(error)
        return function, False
    call = FallbackCallable(function, compiled, on_fallback=on_fallback, passes_through=passes_through, hold=hold)
    return call, True


def first_line(error: BaseException) -> str:
    """First line of an error's text, for one line in a log."""
    return next(iter(str(error).strip().splitlines()), "no message")


def _without_frames(error: Exception) -> Exception:
    """Drop the tracebacks of an error and of what caused it: their frames hold the tensors of the failed call."""
    for link in list(_chain(error)):
        link.__traceback__ = None
    return error


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what caused it; Dynamo wraps what a backend raised."""
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def _itself(value: Any) -> Any:
    return value


def _empty_cache() -> None:
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
