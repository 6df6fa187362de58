"""Which packed length a request gets."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from numbers import Integral
from typing import Literal

from vllm_omni_diffusion_compile.errors import RequestError, SettingError
from vllm_omni_diffusion_compile.settings import MAX_ROWS, ROW_ALIGN, PadSeqBuckets, aligned

PIN = "pad_seq_len"
"""The key of `extra_args` (`extra_params` over HTTP) with which a request pins its packed length."""

_KEY = "pad_seq_buckets"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The packed length of a request that pins none.

    Args:
        length: In rows.
        over: Whether no bucket holds it, so that `length` is the next multiple of 64.
    """

    length: int
    over: bool = False


@dataclass(frozen=True)
class Buckets:
    """Packed lengths, ascending.

    Args:
        lengths: In rows, multiples of 64.
        over: What becomes of a request that none of them holds.
    """

    lengths: tuple[int, ...]
    over: Literal["round", "reject"] = "round"

    @classmethod
    def of(cls, setting: PadSeqBuckets) -> Buckets:
        """Make them of the setting, a rule included."""
        return cls(setting.rows, setting.over)

    def covering(self, used_rows: int) -> int | None:
        """Return the shortest bucket that holds so many rows, or None."""
        index = bisect_left(self.lengths, used_rows)
        return self.lengths[index] if index < len(self.lengths) else None

    def choose(self, used_rows: int) -> Choice:
        """Choose the packed length of a request that pins none.

        Raises:
            RequestError: No bucket holds it and such requests are to be rejected, or nothing can hold it.
        """
        bucket = self.covering(used_rows)
        if bucket is not None:
            return Choice(length=bucket)
        if self.over == "reject":
            raise RequestError(
                f"the request needs {used_rows} rows, expected at most {self.lengths[-1]}, the longest of this "
                f"server's {_KEY}; ask for fewer frames, a smaller size or a shorter prompt",
                status=413,
            )
        if used_rows > MAX_ROWS:
            raise RequestError(
                f"the request needs {used_rows} rows, expected at most {MAX_ROWS}; ask for fewer frames or a smaller "
                "size",
                status=413,
            )
        return Choice(length=aligned(used_rows), over=True)

    def refuse_indivisible(self, ranks: int) -> None:
        """Refuse buckets that sequence parallelism cannot share out evenly.

        Args:
            ranks: How many ranks share a sequence.

        Raises:
            SettingError: Naming the first bucket that cannot be divided.
        """
        for length in self.lengths:
            if length % ranks:
                step = math.lcm(ROW_ALIGN, ranks)
                below, above = length // step * step, -(-length // step) * step
                raise SettingError(
                    f"{_KEY} has {length}, which {ranks} ranks of sequence parallelism cannot share evenly; expected "
                    f"multiples of {step}, such as {f'{below} or ' if below else ''}{above}"
                )


def check_pin(value: object, known_rows: int = 0, named: str = PIN) -> int:
    """Check the packed length that a request pins, as far as the request alone tells.

    Args:
        value: What it pins.
        known_rows: The rows that it certainly has.
        named: How the one who sent it typed the key.

    Raises:
        RequestError: With status 413 if it is too large, else 400.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):  # numpy's count too, as in the release
        shown = repr(value)
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        raise RequestError(f"{named} is {shown} ({type(value).__name__}), expected a whole number of rows")
    value = int(value)
    if value > MAX_ROWS:
        raise RequestError(f"{named} is {_short(value)}, expected at most {MAX_ROWS} rows", status=413)
    if value <= 0:
        raise RequestError(f"{named} is {_short(value)}, expected a positive multiple of {ROW_ALIGN}")
    if value % ROW_ALIGN:
        below, above = value // ROW_ALIGN * ROW_ALIGN, aligned(value)
        raise RequestError(
            f"{named} is {value}, expected a multiple of {ROW_ALIGN}, such as {f'{below} or ' if below else ''}{above}"
        )
    if value < known_rows:
        raise RequestError(
            f"{named} is {value}, expected at least {aligned(known_rows)}: size and length of the video alone take "
            f"{known_rows} rows, and the prompt comes on top"
        )
    return value


def check_pin_divides(pin: int, ranks: int, named: str = PIN) -> None:
    """Check that the ranks that share a sequence can share a pinned one evenly.

    Raises:
        RequestError: They cannot.
    """
    if pin % ranks:
        raise RequestError(
            f"{named} is {pin}, expected a multiple of {math.lcm(ROW_ALIGN, ranks)}: {ranks} ranks of this server "
            "share a sequence"
        )


def check_pin_holds(pin: int, used_rows: int, named: str = PIN) -> None:
    """Check that a pinned length holds a request, now that its rows are counted.

    Raises:
        RequestError: It does not.
    """
    if pin < used_rows:
        raise RequestError(
            f"{named} is {pin}, expected at least {aligned(used_rows)}: with its prompt the request has {used_rows} "
            "rows"
        )


def _short(value: int) -> str:
    return str(value) if abs(value) < 10**30 else "a number of more than 30 digits"
