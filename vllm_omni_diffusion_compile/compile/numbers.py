"""Floats that modules hold are constants of what is compiled.

With dynamic shapes Dynamo takes every float that it meets for a variable, an epsilon or the scale of attention too.
Where an operator wants a plain number there, torch finds that out when all of the graph has been traced, and traces
it once more from the start. With 25 blocks in one graph that is most of what a start with a warm cache takes. So the
switch that makes floats constants (`torch._dynamo.config.specialize_float`) is on while something is compiled, unless
a float may change: one is among a region's arguments, or something was compiled again because of one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

# How Dynamo words that a float was another one: `0/0: self.scale == 0.5  # ...`. Of several graphs that did not fit it
# names one.
# A region that is compiled so often for other reasons may have a float that changes behind one of them.
_OFTEN = 3
_FLOAT_GUARD = re.compile(r"^\d+/\d+: \S+ == -?(\d+\.\d*(e[+-]?\d+)?|\d+e[+-]?\d+)(\s|$)", re.MULTILINE)


class Numbers:
    """Whether floats are constants of what this process compiles."""

    def __init__(self) -> None:
        self.constant = True
        self._config: Any = None
        self._before = False
        self._again: Counter[str] = Counter()

    def keep_constant(self) -> None:
        """Have floats taken as constants from now on; calling it again changes nothing."""
        from torch._dynamo import config
        from torch._dynamo.callback import callback_handler

        self._config = config
        if self._start not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(self._start)
            callback_handler.register_end_callback(self._end)

    def look_at_arguments(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
        """Take floats as variables from now on if there is one among the arguments of a call."""
        self.constant = self.constant and not _has_float((*args, *kwargs.values()))

    def look_at_reason(self, guard: str, region: str) -> None:
        """The same if something was compiled again because a float was another one, or often.

        Args:
            guard: The guard that failed, in Dynamo's words; empty if it was compiled for the first time.
            region: What was compiled.
        """
        if guard:
            self._again[region] += 1
            self.constant = self.constant and _FLOAT_GUARD.search(guard) is None and self._again[region] < _OFTEN

    # Since torch 2.13 each thread, and each context, has its own say: these are called where it is compiled.
    def _start(self, _: object) -> None:
        self._before = self._config.specialize_float
        if self.constant:
            self._config.specialize_float = True

    def _end(self, _: object) -> None:
        self._config.specialize_float = self._before


def _has_float(values: Iterable[Any]) -> bool:
    return any(
        isinstance(value, float)
        or (isinstance(value, (list, tuple)) and _has_float(value))
        or (isinstance(value, dict) and _has_float(value.values()))
        for value in values
    )


NUMBERS = Numbers()
