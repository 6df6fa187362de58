"""Files of rows: JSON lines, one row a line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from vllm_omni_diffusion_compile.errors import EvidenceError
from vllm_omni_diffusion_compile.evidence.row import Row, explain


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a file, or of every `*.jsonl` of a folder.

    Raises:
        EvidenceError: There is none, or a line is no row; the message names file, line and field.
    """
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    rows: list[Row] = []
    where: dict[str, str] = {}
    for file in files:
        for number, line in enumerate(_text(file).splitlines(), 1):
            if not line.strip():
                continue
            place = f"{file}:{number}"
            row = _row(line, place)
            if row.id in where:
                raise EvidenceError(f"{place}: id {row.id!r} stands in {where[row.id]} too; each row needs its own")
            where[row.id] = place
            rows.append(row)
    return rows


def row_named(reference: str) -> Row:
    """Return the row that `FILE#ID` names.

    Raises:
        EvidenceError: There is none.
    """
    file, hash_, name = reference.rpartition("#")
    if not hash_:
        raise EvidenceError(f"{reference!r} names no row; expected FILE#ID, such as docs/evidence/cpu-tiny.jsonl#ID")
    rows = {row.id: row for row in read_rows(Path(file))}
    if name not in rows:
        raise EvidenceError(f"{file} has no row {name!r}; it has {', '.join(rows) or 'none'}")
    return rows[name]


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write rows to a file: those that are there with the same id are replaced, others stay where they are.

    The rows stand in the file in the order in which they are given here.

    Raises:
        EvidenceError: What is there is no file of rows.
    """
    given = {row.id: row for row in rows}
    in_order = iter(given.values())
    known = [next(in_order) if row.id in given else row for row in (read_rows(path) if path.exists() else ())]
    known += in_order
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row.model_dump(mode="json"), sort_keys=False) for row in known]
    # A reader sees all rows or the earlier ones.
    part = path.with_suffix(".part")
    part.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    part.replace(path)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EvidenceError(f"{file} cannot be read ({error}); expected rows of evidence, one object a line") from None


def _row(line: str, place: str) -> Row:
    try:
        return Row.model_validate_json(line)
    except ValidationError as error:
        raise EvidenceError(f"{place}: {explain(error)}") from None
