"""A row says enough, or it is none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.evidence.rows import FIGURES, KEY, PROVENANCE, TRACE, validated
from vllm_omni_diffusion_compile.errors import EvidenceError
from vllm_omni_diffusion_compile.evidence import Row, make_row, read_rows, revision, row_named, write_rows


def _fields(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every place of a row that has a name of its own; within what is keyed freely, none."""
    for name, item in value.items():
        if name != "decode_compiled_calls":  # younger than some rows
            yield (*path, name)
        if isinstance(item, dict) and name in ("key", "trace", "provenance"):
            yield from _fields(item, (*path, name))


PLAIN = validated().model_dump(mode="json")


def _write(folder: Path, *lines: Any) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return file


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    rows = [validated(), make_row("two", KEY | {"topology": "2 devices"}, "not tested", reason="there is one device")]
    write_rows(tmp_path / "below" / "rows.jsonl", rows)
    assert read_rows(tmp_path / "below") == rows
    assert row_named(f"{tmp_path}/below/rows.jsonl#two") == rows[1]


def test_a_row_that_is_measured_again_takes_the_place_of_the_earlier_one(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    write_rows(file, [validated(), validated(id="other")])
    again = validated(shape="256x256")
    write_rows(file, [again])
    assert read_rows(file) == [again, validated(id="other")]


def test_rows_that_are_written_stand_in_their_order_and_others_where_they_were(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    write_rows(file, [validated(id=name) for name in ("b", "other", "a")])
    write_rows(file, [validated(id=name) for name in ("a", "b", "c")])
    assert [row.id for row in read_rows(file)] == ["a", "other", "b", "c"]


@pytest.mark.parametrize("path", list(_fields(PLAIN)), ids=".".join)
def test_a_row_that_lacks_a_field_is_refused_by_file_line_and_field(tmp_path: Path, path: tuple[str, ...]) -> None:
    row = json.loads(json.dumps(PLAIN))
    place = row
    for name in path[:-1]:
        place = place[name]
    del place[path[-1]]
    file = _write(tmp_path, PLAIN | {"id": "whole"}, row)
    with pytest.raises(EvidenceError) as error:
        read_rows(file)
    assert f"{file}:2: " in str(error.value) and f"{'.'.join(path)}: field is missing" in str(error.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"figures": FIGURES[:2]}, "a figure of 'artefact'"),
        ({"figures": (*FIGURES, FIGURES[0] | {"value": 2e-4})}, "transformer: 0.0002 to be at most 0.0001"),
        ({"figures": (FIGURES[0] | {"value": float("nan")}, *FIGURES)}, "figures.0.value"),
        ({"trace": None}, "a trace"),
        ({"trace": TRACE | {"operators": {}}}, "the operators that computed attention"),
        ({"trace": TRACE | {"compiled_calls": 0}}, "calls of compiled code"),
        ({"trace": TRACE | {"fallbacks": 1}}, "no fallbacks"),
        (
            {"key": KEY | {"vae_policy": "always"}, "trace": TRACE | {"decode_compiled_calls": 0}},
            "of a compiled decode",
        ),
        (
            {"key": KEY | {"vae_policy": "blocks"}, "trace": TRACE | {"decode_compiled_calls": 0}},
            "of a compiled decode",
        ),
        ({"provenance": None}, "provenance"),
        ({"provenance": PROVENANCE | {"artefacts": {}}}, "artefacts"),
        ({"provenance": PROVENANCE | {"environment": {}}}, "an environment"),
        ({"provenance": PROVENANCE | {"vllm_omni": "none"}}, "a version of vLLM-Omni"),
        ({"provenance": PROVENANCE | {"request_sha256": "0" * 64}}, "that of the request is"),
        ({"provenance": PROVENANCE | {"artefacts": {"/data/picture.npz": "0" * 64}}}, "paths below the output folder"),
        ({"reason": "it did not hold"}, "no reason"),
    ],
)
def test_nothing_is_validated_without_what_shows_it(change: dict[str, Any], said: str) -> None:
    parts: dict[str, Any] = {"key": KEY, "figures": FIGURES, "trace": TRACE, "provenance": PROVENANCE} | change
    with pytest.raises(EvidenceError, match=said):
        make_row("klein", state="validated", **parts)


@pytest.mark.parametrize("state", ["failed", "rejected", "not tested"])
def test_other_states_say_why(state: Any) -> None:
    with pytest.raises(EvidenceError, match="a reason"):
        make_row("klein", KEY, state, provenance=PROVENANCE)
    assert make_row("klein", KEY, state, reason="it is refused", provenance=PROVENANCE).reason == "it is refused"


def test_a_component_by_itself_has_no_latents_and_no_picture() -> None:
    key = KEY | {"api_mode": "component", "execution_mode": "component"}
    provenance = PROVENANCE | {"vllm_omni": "none"}
    row = make_row("block", key, "validated", figures=FIGURES[:1], trace=TRACE, provenance=provenance)
    assert isinstance(row, Row)


def test_eager_has_no_dynamic() -> None:
    with pytest.raises(EvidenceError, match="compile_scope 'eager' does not go with dynamic True"):
        make_row("klein", KEY | {"compile_scope": "eager"}, "not tested", reason="no time")


def test_two_rows_of_one_name_are_refused(tmp_path: Path) -> None:
    file = _write(tmp_path, PLAIN, PLAIN)
    with pytest.raises(EvidenceError, match=f"{file}:2: id 'klein' stands in {file}:1 too"):
        read_rows(file)


@pytest.mark.parametrize(
    ("reference", "said"),
    [("rows.jsonl", "names no row; expected FILE#ID"), ("rows.jsonl#other", "has no row 'other'; it has klein")],
)
def test_a_row_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    _write(tmp_path, PLAIN)
    with pytest.raises(EvidenceError, match=said):
        row_named(reference)


@pytest.mark.parametrize("content", [b"\xff", b"{", b"[]"])
def test_what_is_no_file_of_rows_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(content)
    with pytest.raises(EvidenceError, match=str(file)):
        read_rows(file)


def test_two_checkpoints_of_one_snapshot_are_two_revisions(tmp_path: Path) -> None:
    folders = [tmp_path / "snapshots" / ("0a" * 20) / name for name in ("FL2VA", "Ref2VA")]
    for folder in folders:
        folder.mkdir(parents=True)
    assert len({revision(folder) for folder in [*folders, folders[0].parent]}) == 3
