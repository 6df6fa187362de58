"""Traces of requests: a million lines in one pass, of which only the numbers of rows are kept."""

from __future__ import annotations

import csv
import gc
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import from_json

from vllm_omni_diffusion_compile.errors import RequestError
from vllm_omni_diffusion_compile.packed_length.columns import Columns, CsvLines, Integers, JsonLines
from vllm_omni_diffusion_compile.packed_length.reading import (
    COUNT,
    KEYS,
    MOST_KEPT,
    PROMPT_ROWS,
    check_key,
    read_count,
    read_shape,
    whole,
)
from vllm_omni_diffusion_compile.packed_length.rows import Shape
from vllm_omni_diffusion_compile.settings import MAX_ROWS

_CHUNK_BYTES = 1 << 20
_CHUNK_LINES = 1 << 13


@dataclass
class Demand:
    """How many rows the requests of a deployment use.

    Args:
        used_rows: Of each line, in order.
        requests: How many requests use so many rows.
    """

    used_rows: array[int] = field(default_factory=lambda: array("q"))
    requests: Counter[int] = field(default_factory=Counter)
    _told: list[tuple[Integers, Integers]] = field(default_factory=list, init=False, repr=False)

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
                with _without_garbage_collection():
                    self._add_csv(path)
            else:
                self._add_json(path)
            self._add_told()
        except OSError as error:
            raise RequestError(f"{path}: {error.strerror or error}") from None
        except (UnicodeDecodeError, csv.Error) as error:
            raise RequestError(f"{path}: {error}; expected text in UTF-8") from None

    def _add_json(self, path: Path) -> None:
        lines = JsonLines()
        shapes: dict[str, int] = {}
        first = 1
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES) + file.readline():
                if not self._add_columns(lines.read(chunk)):
                    for number, line in enumerate(chunk.split(b"\n"), first):
                        if line and not line.isspace():
                            self._add_json_line(line, shapes, path, number)
                first += chunk.count(b"\n")

    def _add_columns(self, columns: Columns | None) -> bool:
        """Add lines if they are simple and right; the others are read one by one, by what can name the wrong one."""
        found = columns.used_rows() if columns is not None else None
        if found is None:
            return False
        self.used_rows.frombytes(found[0].tobytes())
        self._told.append(found)
        return True

    def _add_told(self) -> None:
        """Add the requests of what was read as columns."""
        if self._told:
            used, count = (np.concatenate(columns) for columns in zip(*self._told, strict=True))
            self._told.clear()
            # Sums of floats are exact here: 2**53 is far above what the bounds of a line allow.
            requests = np.bincount(used, weights=count).astype(np.int64)
            lengths = np.flatnonzero(requests)
            self.requests.update(dict(zip(lengths.tolist(), requests[lengths].tolist(), strict=True)))

    def _add_json_line(self, line: bytes, shapes: dict[str, int], path: Path, number: int) -> None:
        where = _where(path, number)
        try:
            item = from_json(line)
        except ValueError as error:
            raise RequestError(f"{where}found no JSON ({error}), expected a mapping with width, height ...") from None
        if not isinstance(item, dict):
            raise RequestError(f"{where}found {str(item)[:80]!r}, expected a mapping with width, height ...")
        self._add_line(item, shapes, where)

    def _add_csv(self, path: Path) -> None:
        shapes: dict[str, int] = {}
        with path.open(encoding="utf-8-sig", newline="") as file:
            cells = csv.reader(file)
            header = [name.strip() for name in next(cells, [])]
            if not {"width", "height"} <= set(header):
                raise RequestError(f"{path}:1: the header is {', '.join(header)!r}, expected at least width and height")
            for name in set(header) - set(KEYS):
                check_key(name, f"{path}:1: ")
            lines = CsvLines(header)
            while chunk := list(islice(((cells.line_num, line) for line in cells if line), _CHUNK_LINES)):
                if self._add_columns(lines.read([line for _, line in chunk])):
                    continue
                for number, line in chunk:
                    where = _where(path, number)
                    if len(line) != len(header):
                        raise RequestError(f"{where}found {len(line)} cell(s), expected {len(header)} as in the header")
                    self._add_line(dict(zip(header, line, strict=True)), shapes, where)

    def _add_line(self, item: Mapping[str, Any], shapes: dict[str, int], where: str) -> None:
        prompt, count = item.get(PROMPT_ROWS), item.get(COUNT)
        rows = _without_prompt(item, where, shapes)
        rows += whole(0 if prompt in ("", None) else prompt, f"{where}{PROMPT_ROWS}", least=0, most=MAX_ROWS)
        self.add(_bounded(rows, where), read_count(1 if count in ("", None) else count, where))


def _without_prompt(item: Mapping[str, Any], where: str, known: dict[str, int]) -> int:
    """Return the rows of a request besides its prompt, looked up where the same was written before."""
    shape = {name: value for name, value in item.items() if name not in (PROMPT_ROWS, COUNT)}
    text = repr(shape)
    rows = known.get(text)
    if rows is None:
        if len(known) >= MOST_KEPT:
            known.clear()
        rows = known[text] = read_shape(shape, where).used_rows
    return rows


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Cells of CSV are many lists, none of which refers to another: looking for cycles takes a fifth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _where(path: Path, number: int) -> str:
    return f"{path}:{number}: "


def _bounded(rows: int, where: str) -> int:
    if rows > MAX_ROWS:
        raise RequestError(f"{where}the request needs {rows} rows, expected at most {MAX_ROWS}", status=413)
    return rows
