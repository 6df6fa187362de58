"""Traces of requests: a million lines in one pass, of which only the numbers of rows are kept.

Most lines of a trace differ from others in their prompt alone. What else such a line says, as text, is parsed, checked
and turned into rows once, and looked up after that.
"""

from __future__ import annotations

import csv
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from pydantic_core import from_json

from vllm_omni_diffusion_compile.errors import RequestError
from vllm_omni_diffusion_compile.packed_length.reading import (
    COUNT,
    PROMPT_ROWS,
    read_count,
    read_shape,
    whole,
)
from vllm_omni_diffusion_compile.packed_length.rows import Shape
from vllm_omni_diffusion_compile.settings import MAX_ROWS

_CHUNK_BYTES = 1 << 17
_MOST_KEPT = 1 << 16
_PROMPT_KEY = b'"prompt_rows"'
# A line around the number of its last "prompt_rows". Lines that it does not fit are parsed one by one.
_PROMPT = re.compile(rb'^(.*"prompt_rows": ?)(0|[1-9]\d{0,8})([,} ].*)$', re.MULTILINE)

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


@dataclass
class Demand:
    """How many rows the requests of a deployment use.

    Args:
        used_rows: Of each line, in order.
        requests: How many requests use so many rows.
    """

    used_rows: array[int] = field(default_factory=lambda: array("l"))
    requests: Counter[int] = field(default_factory=Counter)

    def add(self, used_rows: int, count: int) -> None:
        """Add a line that stands for `count` requests."""
        self.used_rows.append(used_rows)
        self.requests[used_rows] += count

    def add_shapes(self, shapes: Iterable[tuple[Shape, int]], where: str = "") -> None:
        """Add shapes and how many requests have each.

        Raises:
            RequestError: One has more rows than a packed sequence can have.
        """
        for shape, count in shapes:
            self.add(_bounded(shape.used_rows, where), count)

    def add_trace(self, path: Path) -> None:
        """Add the lines of a trace: CSV with a header if its name ends so, else a JSON mapping a line.

        Raises:
            RequestError: The file cannot be read, or a line is wrong; the message names it.
        """
        try:
            if path.suffix.lower() == ".csv":
                self._add_csv(path)
            else:
                self._add_json(path)
        except OSError as error:
            raise RequestError(f"{path}: {error.strerror or error}") from None
        except (UnicodeDecodeError, csv.Error) as error:
            raise RequestError(f"{path}: {error}; expected text in UTF-8") from None

    def _add_json(self, path: Path) -> None:
        shapes: dict[str, int] = {}
        known: dict[tuple[bytes, bytes], tuple[int, int]] = {}
        first = 1
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES) + file.readline():
                found = _PROMPT.findall(chunk)
                lines = chunk.count(b"\n") + (not chunk.endswith(b"\n"))
                if len(found) != lines:
                    for number, line in enumerate(chunk.split(b"\n"), first):
                        if line and not line.isspace():
                            self._add_json_line(line, shapes, path, number)
                    first += lines
                    continue
                add, requests = self.used_rows.append, self.requests
                for number, (before, prompt, after) in enumerate(found, first):
                    try:
                        rows, count = known[before, after]
                    except KeyError:
                        rows, count = self._add_json_line(before + prompt + after, shapes, path, number)
                        if before.count(_PROMPT_KEY) == 1 and _PROMPT_KEY not in after:
                            _remember(known, (before, after), (rows - int(prompt), count))
                        continue
                    rows += int(prompt)
                    if rows > MAX_ROWS:
                        _bounded(rows, _where(path, number))
                    add(rows)
                    requests[rows] += count
                first += lines

    def _add_json_line(self, line: bytes, shapes: dict[str, int], path: Path, number: int) -> tuple[int, int]:
        where = _where(path, number)
        try:
            item = from_json(line)
        except ValueError as error:
            raise RequestError(f"{where}found no JSON ({error}), expected a mapping with width, height ...") from None
        if not isinstance(item, dict):
            raise RequestError(f"{where}found {str(item)[:80]!r}, expected a mapping with width, height ...")
        rows = _without_prompt(item, where, shapes)
        return self._add_line(rows, item.get(PROMPT_ROWS, 0), item.get(COUNT, 1), where)

    def _add_csv(self, path: Path) -> None:
        known: dict[Any, int] = {}
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = csv.reader(file)
            header = [name.strip() for name in next(lines, [])]
            if not {"width", "height"} <= set(header):
                raise RequestError(f"{path}:1: the header is {', '.join(header)!r}, expected at least width and height")
            shape = itemgetter(*(index for index, name in enumerate(header) if name not in (PROMPT_ROWS, COUNT)))
            places = {name: index for index, name in enumerate(header)}
            prompt, count = places.get(PROMPT_ROWS), places.get(COUNT)
            for cells in lines:
                if len(cells) != len(header):
                    if not cells:
                        continue
                    raise RequestError(
                        f"{path}:{lines.line_num}: found {len(cells)} cell(s), expected {len(header)} as in the header"
                    )
                key = shape(cells)
                rows = known.get(key)
                if rows is None:
                    where = _where(path, lines.line_num)
                    rows = _without_prompt(dict(zip(header, cells, strict=True)), where, {})
                    _remember(known, key, rows)
                prompt_rows, requests = _written(cells, prompt, 0), _written(cells, count, 1)
                if type(prompt_rows) is int and type(requests) is int and requests and rows + prompt_rows <= MAX_ROWS:
                    self.used_rows.append(rows + prompt_rows)
                    self.requests[rows + prompt_rows] += requests
                else:
                    self._add_line(rows, prompt_rows, requests, _where(path, lines.line_num))

    def _add_line(self, rows: int, prompt: object, count: object, where: str) -> tuple[int, int]:
        rows += whole(0 if prompt in ("", None) else prompt, f"{where}{PROMPT_ROWS}", least=0, most=MAX_ROWS)
        requests = read_count(1 if count in ("", None) else count, where)
        self.add(_bounded(rows, where), requests)
        return rows, requests


def _without_prompt(item: Mapping[str, Any], where: str, known: dict[str, int]) -> int:
    shape = {name: value for name, value in item.items() if name not in (PROMPT_ROWS, COUNT)}
    text = repr(shape)
    rows = known.get(text)
    if rows is None:
        rows = read_shape(shape, where).used_rows
        _remember(known, text, rows)
    return rows


def _remember(known: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    if len(known) >= _MOST_KEPT:
        known.clear()
    known[key] = value


def _written(cells: list[str], place: int | None, default: int) -> int | str:
    """Return a number of a CSV line as far as that is simple; what is not is left to be refused."""
    if place is None:
        return default
    cell = cells[place]
    return int(cell) if cell.isdecimal() and len(cell) < 19 else cell


def _where(path: Path, number: int) -> str:
    return f"{path}:{number}: "


def _bounded(rows: int, where: str) -> int:
    if rows > MAX_ROWS:
        raise RequestError(f"{where}the request needs {rows} rows, expected at most {MAX_ROWS}", status=413)
    return rows
