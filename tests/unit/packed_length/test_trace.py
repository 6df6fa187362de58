"""Requests as they stand in flags, YAML and traces."""

from __future__ import annotations

import contextlib
import csv
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_diffusion_compile.errors import RequestError
from vllm_omni_diffusion_compile.packed_length.reading import KEYS, read_references, read_shape
from vllm_omni_diffusion_compile.packed_length.trace import Demand

FILM = {"width": 1344, "height": 768}
REFERENCES = "image:1024x768; audio:3s; video:640x352:56:104"


def demand(path: Path) -> Demand:
    made = Demand()
    made.add_trace(path)
    return made


def _lines(draw: random.Random, count: int) -> list[dict[str, Any]]:
    """Lines of all tasks, in a few of the ways in which one can be written."""
    lines: list[dict[str, Any]] = []
    for _ in range(count):
        line: dict[str, Any] = {"width": draw.choice((1344, 672)), "height": draw.choice((768, 384))}
        task = draw.choice(("t2va", "fl2va", "ref2va"))
        line |= draw.choice(({"frames": draw.randrange(96, 300)}, {"seconds": draw.uniform(4, 15)}, {}))
        line |= {"keyframes": draw.randrange(1, 3)} if task == "fl2va" else {}
        line |= {"references": REFERENCES} if task == "ref2va" else {}
        line |= draw.choice(({"task": task}, {"task": task.upper()}, {}))
        line |= draw.choice(({"prompt_rows": draw.randrange(900)}, {}))
        line |= draw.choice(({"count": draw.randrange(1, 9)}, {}))
        items = list(line.items())
        draw.shuffle(items)
        lines.append(dict(items))
    return lines


def test_every_way_of_writing_a_trace_gives_the_same_rows(tmp_path: Path) -> None:
    lines = _lines(random.Random(3), 2000)
    expected = [read_shape(line).used_rows for line in lines]
    text = [json.dumps(line, separators=random.Random(4).choice(((", ", ": "), (",", ":")))) for line in lines]
    (tmp_path / "a.jsonl").write_text("\n".join(text))
    (tmp_path / "gaps.jsonl").write_text("\n\n  \n".join(text) + "\n")
    (tmp_path / "dos.jsonl").write_bytes("\r\n".join(text).encode())
    with (tmp_path / "a.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, [*KEYS, "note"])
        table.writeheader()
        table.writerows(line | {"note": number} for number, line in enumerate(lines))
    for name in ("a.jsonl", "gaps.jsonl", "dos.jsonl", "a.csv"):
        found = demand(tmp_path / name)
        assert list(found.used_rows) == expected, name
        assert sum(found.requests.values()) == sum(line.get("count", 1) for line in lines), name


def test_a_line_that_mentions_its_prompt_twice_is_read_as_json_reads_it(tmp_path: Path) -> None:
    same = json.dumps(FILM | {"note": 'a "prompt_rows": 7 in a text', "prompt_rows": 100})
    inner = json.dumps(FILM | {"prompt_rows": 200, "note": {"prompt_rows": 7}})
    (tmp_path / "a.jsonl").write_text(f"{same}\n{inner}\n{same}\n{inner}\n{inner}")
    bare = read_shape(FILM).used_rows
    assert [rows - bare for rows in demand(tmp_path / "a.jsonl").used_rows] == [100, 200, 100, 200, 200]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"width": 1344, "height": 768, "prompt_rows": 1.5}', "prompt_rows is 1.5, expected a whole number"),
        ('{"width": 1344, "height": 768, "prompt_rows": -1}', "prompt_rows is -1, expected 0 to"),
        ('{"width": 1344, "height": 768, "prompt_rows": true}', "prompt_rows is True, expected a whole number"),
        ('{"width": 1344, "height": 768, "prompt_rows": 9999999}', "prompt_rows is 9999999, expected 0 to 1048576"),
        ('{"width": 1344, "height": 768, "prompt_rows": 1000000}', "needs 1063192 rows, expected at most 1048576"),
        ('{"width": 1344, "height": 768, "prompt_rows": 5, "count": 0}', "count is 0, expected 1 to"),
        ('{"width": 1344, "prompt_rows": 5}', "height is missing"),
        ('{"width": 1344, "height": 768, "promt_rows": 5}', "unknown key 'promt_rows'; did you mean 'prompt_rows'"),
        ('{"width": 1344, "height": 768, "prompt_rows": 5', "found no JSON"),
        ('[{"width": 1344, "height": 768, "prompt_rows": 5}]', "expected a mapping"),
        ('{"width": 1344, "height": 768, "frames": 1, "seconds": 2}', "seconds is given beside frames"),
        ('{"width": 1344, "height": 768, "seconds": 1e400}', "seconds is inf, expected a number of seconds"),
        ('{"width": 8, "height": 768}', "width is 8, expected 32 to"),
        ('{"width": 1344, "height": 768, "task": "i2v"}', "task is 'i2v', expected t2va, fl2va or ref2va"),
        ('{"width": 1344, "height": 768, "task": "fl2va"}', "keyframes is 0, expected 1 or 2 for the task fl2va"),
        (
            '{"width": 1344, "height": 768, "task": "t2va", "keyframes": 1}',
            "keyframes is 1, expected 0 for the task t2",
        ),
        ('{"width": 1344, "height": 768, "task": "ref2va"}', "references has 0, expected at least one"),
        ('{"width": 1344, "height": 768, "references": ["clip:1"]}', r"references\[0\] is 'clip:1', expected one such"),
        ('{"width": 1344, "height": 768, "references": [{"kind": "audio"}]}', "says nothing of its length"),
        ('{"width": 1344, "height": 768, "references": [{"kind": "x"}]}', r"references\[0\].kind is 'x', expected"),
    ],
)
def test_a_wrong_line_is_named_with_its_file_and_number(tmp_path: Path, line: str, message: str) -> None:
    good = json.dumps(FILM | {"prompt_rows": 100})
    path = tmp_path / "a.jsonl"
    path.write_text(f"{good}\n{good}\n\n{line}\n{good}\n")
    with pytest.raises(RequestError, match=rf"a\.jsonl:4: .*{message}"):
        demand(path)


def test_a_csv_without_its_columns_or_cells(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("w,h\n1,2\n")
    with pytest.raises(RequestError, match="a.csv:1: the header is 'w, h', expected at least width and height"):
        demand(path)
    path.write_text("width,height,prompt_rows\n1344,768,5\n1344,768\n")
    with pytest.raises(RequestError, match=r"a.csv:3: found 2 cell\(s\), expected 3"):
        demand(path)
    path.write_text("width,height,prompt_rows\n1344.0,768,5.0\n1344,768,many\n")
    with pytest.raises(RequestError, match="a.csv:3: prompt_rows is 'many', expected a whole number"):
        demand(path)
    with pytest.raises(RequestError, match="none.csv: No such file"):
        demand(tmp_path / "none.csv")


def test_references_can_be_written_in_several_ways() -> None:
    written = read_references(REFERENCES)
    assert written == read_references(
        [
            {"kind": "image", "width": 1024, "height": 768},
            {"kind": "audio", "seconds": 3},
            {"kind": "video", "width": 640, "height": 352, "frames": 56, "audio_steps": 104},
        ]
    )
    assert written == read_references('[["image", 1024, 768], ["audio", 120], ["video", 640, 352, 56, 104]]')
    packed = [{"type": "image", "width": 1024, "height": 768}, {"kind": "audio", "ref_audio_t": 120}]
    assert read_references(packed) == written[:2]
    assert read_references(0) == read_references("0") == read_references("") == ()
    assert [reference.rows for reference in written] == [32 * 24, 240, 17 * 20 * 11 + 208]


_ANY = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12), st.lists)


_REST = dict.fromkeys(set(KEYS) - {"width", "height"}, _ANY)


@given(st.fixed_dictionaries({"width": _ANY | st.just(1344), "height": st.just(768)}, optional=_REST))
def test_whatever_a_line_says_it_is_read_or_refused(line: dict[str, Any]) -> None:
    with contextlib.suppress(RequestError):
        assert read_shape(line).used_rows > 0


_USUAL: dict[str, st.SearchStrategy[Any]] = {
    "task": st.sampled_from(["t2va", "FL2VA", "ref2va"]),
    "frames": st.integers(1, 400),
    "seconds": st.floats(0.01, 20) | st.integers(1, 20),
    "keyframes": st.integers(0, 2),
    "references": st.sampled_from([[], REFERENCES.split("; "), ["audio:0"]]),
    "prompt_rows": st.integers(0, 900),
    "count": st.integers(1, 10**9),
    "id": st.integers(),
}
_LINE = st.fixed_dictionaries(
    {"width": st.integers(32, 2000), "height": st.integers(32, 2000)},
    optional={name: usual | st.none() | _ANY for name, usual in _USUAL.items()},
)


@given(st.lists(_LINE, min_size=1, max_size=4))
def test_lines_read_together_say_what_they_say_one_by_one(
    tmp_path_factory: pytest.TempPathFactory, lines: list[dict[str, Any]]
) -> None:
    folder = tmp_path_factory.mktemp("trace")
    (folder / "a.jsonl").write_text(
        "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines if _finite(line))
    )
    columns = list({name: None for line in lines for name in line})
    with (folder / "a.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, columns)
        table.writeheader()
        table.writerows(lines)
    for path, together in ((folder / "a.jsonl", "JsonLines"), (folder / "a.csv", "CsvLines")):
        found = _demanded(path)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(f"vllm_omni_diffusion_compile.packed_length.trace.{together}.read", lambda *_: None)
            assert found == _demanded(path)


def _finite(line: dict[str, Any]) -> bool:
    with contextlib.suppress(ValueError):
        json.dumps(line, allow_nan=False)
        return True
    return False


def _demanded(path: Path) -> object:
    try:
        found = demand(path)
    except RequestError as error:
        return str(error)
    return found.used_rows.tolist(), sorted(found.requests.items())


def test_a_million_different_requests_are_read_in_array_operations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(5)
    lines = [
        {"width": draw.randrange(64, 2048), "height": draw.randrange(64, 2048), "seconds": draw.uniform(1, 15),
         "prompt_rows": draw.randrange(900), "user": f"u{number}"}
        for number in range(3000)
    ]  # fmt: skip
    expected = [read_shape(line).used_rows for line in lines]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with (tmp_path / "a.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, list(lines[0]))
        table.writeheader()
        table.writerows(lines)

    def refuse(*_: object) -> int:
        raise AssertionError("a line was read by itself")

    monkeypatch.setattr("vllm_omni_diffusion_compile.packed_length.trace.read_shape", refuse)
    for name in ("a.jsonl", "a.csv"):
        assert demand(tmp_path / name).used_rows.tolist() == expected, name


@pytest.mark.parametrize(
    "line",
    [
        {"width": 512, "height": 512, "keyframes": 1, "references": ["image:64x64"]},
        {"width": 512, "height": 512, "frames": -(2**63)},
        {"width": 512, "height": 512, "count": -(2**63)},
    ],
    ids=str,
)
def test_what_no_request_can_have_is_refused_among_lines_that_are_right(tmp_path: Path, line: dict[str, Any]) -> None:
    lines = [{"width": 512, "height": 512}, line]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    with (tmp_path / "a.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, list(line))
        table.writeheader()
        table.writerows(
            [
                each | {"references": ";".join(each.get("references", []))} if "references" in line else each
                for each in lines
            ]
        )
    for name, place in (("a.jsonl", "a.jsonl:2"), ("a.csv", "a.csv:3")):
        with pytest.raises(RequestError, match=place):
            demand(tmp_path / name)


def test_lines_of_another_length_than_the_header_are_refused_when_all_are(tmp_path: Path) -> None:
    (tmp_path / "long.csv").write_text("width,height\n512,512,7\n")
    (tmp_path / "twice.csv").write_text("width,height,width\n512,512\n")
    for name, found in (("long.csv", 3), ("twice.csv", 2)):
        with pytest.raises(RequestError, match=f"{name}:2: found {found} cell"):
            demand(tmp_path / name)
