"""Requests as columns of numbers, so that a million of them become rows in array operations.

The formulas are those of `rows.py`, and what can be written here is a part of what `reading.py` accepts. Requests that
are written otherwise, or that cannot be, are left to it: `Columns.used_rows` then returns None.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from vllm_omni_diffusion_compile.errors import RequestError
from vllm_omni_diffusion_compile.packed_length import reading
from vllm_omni_diffusion_compile.packed_length.rows import (
    AUDIO_CHANNELS,
    AUDIO_HZ,
    DEFAULT_FRAMES,
    FPS,
    PIXELS_PER_ROW,
    TASKS,
)
from vllm_omni_diffusion_compile.settings import MAX_ROWS

Integers = NDArray[np.int64]

# Stands for what a request does not state. Nobody can state it: numbers below the other one are left to `reading.py`.
_UNSTATED = int(np.iinfo(np.int64).min)
_LEAST = -(2**62)
_NO_REFERENCES = -1
_T2VA, _FL2VA, _REF2VA = range(len(TASKS))
_TASK_CODES: Mapping[object, int] = {
    **{spelt: code for code, task in enumerate(TASKS) for spelt in (task, task.upper())},
    None: _UNSTATED,
    "": _UNSTATED,
}
_DEFAULT_FRAMES_BY_CODE = np.array([DEFAULT_FRAMES[task] for task in TASKS])
# Fields that a trace may carry besides ours: an identifier, a time, the prompt itself, ...
_MOST_FIELDS = 64


class ReferenceRows(dict[Any, int]):
    """Rows of each list of references that was met, under what stood in the trace; -1 for an empty one.

    Args:
        read: Makes what `read_references` takes of it.
    """

    def __init__(self, read: Callable[[Any], object]) -> None:
        super().__init__()
        self._read = read

    def __missing__(self, written: Any) -> int:
        """Read what was not met before."""
        if len(self) >= reading.MOST_KEPT:
            self.clear()
        references = reading.read_references(self._read(written))
        self[written] = rows = sum(reference.rows for reference in references) if references else _NO_REFERENCES
        return rows


@dataclass(frozen=True, kw_only=True)
class Columns:
    """One number a request, all arrays [requests] int64 unless said otherwise; what is not stated is `_UNSTATED`.

    Args:
        task: Index in `TASKS`.
        width: In pixels.
        height: In pixels.
        frames: Asked for.
        seconds: Asked for, float64; nan where they are not stated.
        keyframes: Of FL2VA.
        references: Rows of the references; -1 for none.
        prompt_rows: Tokens of the prompt.
        count: How many requests the line stands for.
    """

    task: Integers
    width: Integers
    height: Integers
    frames: Integers
    seconds: NDArray[np.float64]
    keyframes: Integers
    references: Integers
    prompt_rows: Integers
    count: Integers

    def used_rows(self) -> tuple[Integers, Integers] | None:
        """Return the used rows of each line and how many requests have them; None if one may have to be refused."""
        keyframes = _stated(self.keyframes, 0)
        prompt = _stated(self.prompt_rows, 0)
        count = _stated(self.count, 1)
        timed = ~np.isnan(self.seconds)
        framed = self.frames != _UNSTATED
        implied = np.where(self.references != _NO_REFERENCES, _REF2VA, np.where(keyframes > 0, _FL2VA, _T2VA))
        task = np.where(self.task == _UNSTATED, implied, self.task)
        frames = np.where(framed, self.frames, _DEFAULT_FRAMES_BY_CODE[task])
        seconds = np.where(timed, self.seconds, 1.0)
        sound = (
            _within(self.width, reading.SMALLEST, reading.LARGEST)
            and _within(self.height, reading.SMALLEST, reading.LARGEST)
            and _within(frames, 1, reading.MOST_FRAMES)
            and bool(np.all((seconds > 0) & (seconds * FPS <= reading.MOST_FRAMES)))
            and _within(keyframes, 0, 2)
            and _within(prompt, 0, MAX_ROWS)
            and _within(count, 1, reading.MOST_REQUESTS)
            and not np.any(timed & framed)
            and not np.any((keyframes > 0) & (self.references != _NO_REFERENCES))
            and np.array_equal(task, implied)
        )
        if not sound:
            return None
        # Halves go to the even neighbour, as in Python.
        frames = np.where(timed, np.maximum(1, np.rint(seconds * FPS).astype(np.int64)), frames)
        frames += (5 - frames) % 17
        still = (self.width // PIXELS_PER_ROW) * (self.height // PIXELS_PER_ROW)
        video = ((frames - 5) // 17 * 5 + 2) * still
        audio = AUDIO_CHANNELS * np.rint(frames / FPS * AUDIO_HZ).astype(np.int64)
        used: Integers = prompt + keyframes * still + np.maximum(self.references, 0) + audio + video
        return (used, count) if _within(used, 0, MAX_ROWS) else None


class JsonLines:
    """Reads lines of JSON into columns."""

    def __init__(self) -> None:
        self._references = ReferenceRows(_decoded_references)
        self._others: list[str] = []
        self._decoder = self._made()

    def read(self, lines: bytes) -> Columns | None:
        """Read lines; None if one of them is not simply a mapping of the numbers that are expected."""
        try:
            requests = self._decoded(lines)
            if len(requests) != lines.count(b"\n") + (not lines.endswith(b"\n")):
                return None  # not one on each line
            return Columns(
                task=_integers([_TASK_CODES[line.task] for line in requests]),
                width=_integers([line.width for line in requests]),
                height=_integers([line.height for line in requests]),
                frames=_integers([line.frames for line in requests]),
                seconds=np.array([line.seconds for line in requests], dtype=np.float64),
                keyframes=_integers([line.keyframes for line in requests]),
                references=_integers(
                    [
                        _NO_REFERENCES if (written := line.references) is None else self._references[bytes(written)]
                        for line in requests
                    ]
                ),
                prompt_rows=_integers([line.prompt_rows for line in requests]),
                count=_integers([line.count for line in requests]),
            )
        except (msgspec.MsgspecError, RequestError, KeyError, OverflowError, ValueError):
            # Whatever it is, reading line by line accepts it or says what is wrong and where.
            return None

    def _decoded(self, lines: bytes) -> list[Any]:
        while True:
            try:
                found: list[Any] = self._decoder.decode_lines(lines)
            except msgspec.ValidationError as error:
                name = _unknown_field(str(error))
                if name is None or len(self._others) >= _MOST_FIELDS:
                    raise
                reading.check_key(name)
                self._others.append(name)
                self._decoder = self._made()
            else:
                return found

    def _made(self) -> msgspec.json.Decoder[Any]:
        others = [(f"other_{index}", msgspec.Raw, msgspec.Raw(b"")) for index in range(len(self._others))]
        names = {f"other_{index}": name for index, name in enumerate(self._others)}
        line = msgspec.defstruct(
            "Line",
            [*_LINE, *others],
            forbid_unknown_fields=True,
            rename=lambda field: names.get(field, field),
            gc=False,
        )
        return msgspec.json.Decoder(line)


_Integer = Annotated[int, msgspec.Meta(ge=_LEAST)]
_LINE: list[Any] = [
    ("width", int),
    ("height", int),
    ("task", str | None, None),
    ("frames", _Integer | None, _UNSTATED),
    ("seconds", float | None, None),
    ("keyframes", _Integer | None, _UNSTATED),
    ("references", msgspec.Raw, None),
    ("prompt_rows", _Integer | None, _UNSTATED),
    ("count", _Integer | None, _UNSTATED),
]
_UNKNOWN_FIELD = re.compile(r"unknown field `(.*)` - at ", re.DOTALL)


def _unknown_field(message: str) -> str | None:
    found = _UNKNOWN_FIELD.search(message)
    return found[1] if found else None


def _decoded_references(written: bytes) -> object:
    references = msgspec.json.decode(written)
    return () if references is None else references


class CsvLines:
    """Reads the cells of CSV lines into columns.

    Args:
        header: Names of the cells.
    """

    def __init__(self, header: Sequence[str]) -> None:
        self._cells_in_a_line = len(header)
        self._places = {name: index for index, name in enumerate(header)}
        self._references = ReferenceRows(lambda text: text)

    def read(self, lines: Sequence[Sequence[str]]) -> Columns | None:
        """Read lines; None if one of them has other cells than the numbers that are expected."""
        try:
            columns = list(zip(*lines, strict=True))
            if len(columns) != self._cells_in_a_line:
                return None
            unstated = np.full(len(columns[0]), _UNSTATED)
            cells = {name: columns[place] for name, place in self._places.items()}
            numbers = {name: _numbers(cells[name]) if name in cells else unstated for name in _NUMBERS}
            task, seconds, references = cells.get("task"), cells.get("seconds"), cells.get("references")
            return Columns(
                **numbers,
                task=unstated if task is None else _integers([_TASK_CODES[cell] for cell in task]),
                seconds=np.full(len(unstated), np.nan) if seconds is None else _seconds(seconds),
                references=np.full(len(unstated), _NO_REFERENCES)
                if references is None
                else _integers([self._references[cell] for cell in references]),
            )
        except (RequestError, KeyError, OverflowError, ValueError):
            return None  # as above


_NUMBERS = ("width", "height", "frames", "keyframes", "prompt_rows", "count")


def _numbers(cells: Sequence[str]) -> Integers:
    if "" in cells:
        stated = [int(cell) for cell in cells if cell]
        numbers = _integers([int(cell) if cell else None for cell in cells])
    else:
        stated = list(map(int, cells))
        numbers = _integers(stated)
    if stated and min(stated) < _LEAST:
        raise ValueError("a number that is far below all that can be meant")
    return numbers


def _seconds(cells: Sequence[str]) -> NDArray[np.float64]:
    seconds = np.array([float(cell) if cell else np.nan for cell in cells])
    if np.count_nonzero(np.isnan(seconds)) != cells.count(""):
        raise ValueError("a number of seconds that is none")
    return seconds


def _integers(numbers: Sequence[int | None]) -> Integers:
    try:
        return np.array(numbers, dtype=np.int64)
    except TypeError:  # None among them
        return np.array([_UNSTATED if number is None else number for number in numbers], dtype=np.int64)


def _stated(numbers: Integers, default: int) -> Integers:
    return np.where(numbers == _UNSTATED, default, numbers)


def _within(numbers: Integers, least: int, most: int) -> bool:
    return bool(numbers.min() >= least and numbers.max() <= most)
