"""Files that settings name: what a server would find of them."""

from __future__ import annotations

from pathlib import Path

from vllm_omni_diffusion_compile.doctor.files import check_files
from vllm_omni_diffusion_compile.doctor.finding import Finding

EVIDENCE = Path(__file__).resolve().parents[3] / "docs" / "evidence" / "cpu-tiny.jsonl"


def one(**named: str) -> Finding:
    (finding,) = check_files(**named)
    return finding


def test_nothing_is_said_where_nothing_is_named() -> None:
    assert not list(check_files())


def test_a_report_goes_where_a_folder_can_be_made(tmp_path: Path) -> None:
    assert one(report_path=str(tmp_path / "not" / "yet" / "there.json")).state == "ok"
    assert not list(tmp_path.iterdir())


def test_a_report_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    finding = one(report_path=str(tmp_path / "file" / "report.json"))
    assert finding.state == "limit"
    assert "file/report.json cannot be written: Not a directory" in finding.found


def test_evidence_that_is_not_there_keeps_the_server_from_starting(tmp_path: Path) -> None:
    finding = one(require_evidence=str(tmp_path / "rows.jsonl"))
    assert finding.state == "broken" and "rows.jsonl cannot be read" in finding.found


def test_evidence_without_a_validated_row_keeps_the_server_from_starting(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    finding = one(require_evidence=str(tmp_path))
    assert finding.state == "broken" and "no validated row" in finding.found


def test_whether_a_row_is_for_this_start_is_not_known_before_it() -> None:
    finding = one(require_evidence=str(EVIDENCE))
    assert finding.state == "unknown" and "validated row(s)" in finding.found
