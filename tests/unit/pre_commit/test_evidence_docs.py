"""Evidence in the documentation: rows that can be read, a page in step with them, and no claim without a row."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.evidence.rows import validated
from tools.pre_commit import check_claims
from tools.pre_commit.check_claims import check
from tools.pre_commit.render_docs import DOCS, out_of_step
from tools.pre_commit.render_evidence import files_of, render_evidence
from vllm_omni_diffusion_compile.errors import EvidenceError
from vllm_omni_diffusion_compile.evidence import make_row, write_rows

STATES = {"good": "validated", "bad": "failed"}


@pytest.mark.parametrize(
    "text",
    [
        "Regional scope is validated on CPU: [evidence](evidence.md#row-good).",
        "It was Qualified, over\ntwo lines: see [this](docs/evidence.md#row-good).",
        "It refuses to start without a validated row.",
        "`validated` is a state.",
        "```\nvalidated\n```",
        "Nothing is said. [It failed](evidence.md#row-bad)",
        "| scope | state |\n|---|---|\n| full | validated, [evidence](evidence.md#row-good) |",
    ],
)
def test_a_claim_with_its_row_passes(text: str) -> None:
    assert list(check(text, STATES)) == []


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("First.\n\nFull scope is validated on H200.", 3, "links to no row"),
        ("- a: validated, [evidence](evidence.md#row-good)\n- b: validated", 2, "links to no row"),
        ("| a | validated |\n| b | [x](evidence.md#row-good) |", 1, "links to no row"),
        ("It is validated: [evidence](evidence.md#row-bad).", 1, "row 'bad' is 'failed'"),
        ("It is validated: [evidence](evidence.md#row-other).", 1, "there is no such row"),
        ("See [this](evidence.md#row-gone).", 1, "there is no such row"),
        ("```\ncode\n```\n\nqualified", 5, "links to no row"),
    ],
)
def test_a_claim_without_its_row_is_refused(text: str, line: int, said: str) -> None:
    ((found, message),) = check(text, STATES)
    assert found == line and said in message


def test_the_documentation_claims_nothing_that_has_no_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_claims.main() == 0, capsys.readouterr().out


def test_every_row_of_the_documentation_can_be_read() -> None:
    assert any(row.state == "validated" for rows in files_of(DOCS / "evidence").values() for row in rows)


def test_a_row_that_lacks_a_field_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    write_rows(file, [validated()])
    file.write_text(file.read_text().replace('"seed": 1, "artefacts"', '"artefacts"'))
    with pytest.raises(EvidenceError, match=r"rows\.jsonl:1: provenance\.seed: field is missing"):
        files_of(tmp_path)


def test_a_row_that_is_not_rendered_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "evidence.md"
    page.write_text(render_evidence({"cpu": [validated()]}, ""))
    assert not out_of_step(tmp_path, {"evidence.md": render_evidence({"cpu": [validated()]}, "")})
    more = {"cpu": [validated(), validated(id="new", compile_scope="full")]}
    assert '<a id="row-new"></a>new' in out_of_step(tmp_path, {"evidence.md": render_evidence(more, "")})


def test_the_page_says_what_is_unusual_and_why_it_is_not_validated() -> None:
    refused = make_row(
        "two", validated(topology="2 devices: ulysses 2", bucket=640).key, "not tested", reason="there is | one device"
    )
    page = render_evidence({"cpu": [validated(), refused]}, "")
    (line,) = [line for line in page.splitlines() if 'id="row-two"' in line]
    assert "not tested" in line and "topology: 2 devices: ulysses 2" in line and "bucket: 640" in line
    assert "there is \\| one device" in line
    (line,) = [line for line in page.splitlines() if 'id="row-klein"' in line]
    assert "topology" not in line and "1e-06 of 0.0001" in line
