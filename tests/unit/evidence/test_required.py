"""A start that demands evidence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.evidence.rows import FIGURES, KEY, PROVENANCE, TRACE, validated
from vllm_omni_diffusion_compile.errors import EvidenceError
from vllm_omni_diffusion_compile.evidence import Row, make_row, write_rows
from vllm_omni_diffusion_compile.evidence.required import AT_START, OF_SETTINGS, SOFTWARE, require

KNOWN = {name: KEY[name] for name in AT_START if name != "bucket"}
MADE = {name: PROVENANCE[name] for name in SOFTWARE}


def _required(folder: Path, *rows: Row, buckets: Any = (None,), **changes: Any) -> list[str]:
    write_rows(folder / "rows.jsonl", rows)
    known, made = KNOWN | changes, MADE | changes
    found = require(
        folder, {name: known[name] for name in KNOWN}, {name: made[name] for name in MADE}, buckets, "qualify it"
    )
    return [row.id for row in found]


def test_a_validated_row_of_another_shape_lets_it_start(tmp_path: Path) -> None:
    assert _required(tmp_path, validated(id="other", dtype="float32"), validated(shape="512x512")) == ["klein"]


@pytest.mark.parametrize("name", [*KNOWN, *MADE])
def test_anything_else_that_differs_is_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(EvidenceError) as error:
        _required(tmp_path, validated(), **{name: "something else"})
    assert f"The nearest one, 'klein', differs in {name} ('something else' here" in str(error.value)
    assert str(error.value).endswith("Qualify it on this machine: qualify it")


@pytest.mark.parametrize("state", ["failed", "rejected", "not tested"])
def test_only_a_validated_row_counts(tmp_path: Path, state: Any) -> None:
    row = make_row("klein", KEY, state, reason="so it is", provenance=PROVENANCE)
    with pytest.raises(EvidenceError, match="no validated row"):
        _required(tmp_path, row)


def test_a_component_by_itself_is_no_evidence_for_a_server(tmp_path: Path) -> None:
    key = KEY | {"api_mode": "component"}
    row = make_row("klein", key, "validated", figures=FIGURES, trace=TRACE, provenance=PROVENANCE)
    with pytest.raises(EvidenceError, match="no validated row of a model that was served"):
        _required(tmp_path, row)


def test_each_bucket_needs_a_row(tmp_path: Path) -> None:
    rows = (validated(id="small", bucket=640), validated(id="large", bucket=1024))
    assert _required(tmp_path, *rows, buckets=(640, 1024)) == ["small", "large"]
    with pytest.raises(EvidenceError, match="bucket \\(2048 here"):
        _required(tmp_path, *rows, buckets=(640, 2048))


def test_no_file_is_no_evidence(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match=r"missing\.jsonl cannot be read"):
        require(tmp_path / "missing.jsonl", KNOWN, MADE, [None], "qualify it")
    (tmp_path / "empty").mkdir()
    with pytest.raises(EvidenceError, match="no validated row"):
        require(tmp_path / "empty", KNOWN, MADE, [None], "qualify it")


def test_a_row_made_with_another_executor_is_no_evidence(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [validated()])
    config = dict(OF_SETTINGS)
    assert require(tmp_path, KNOWN, MADE, [None], "qualify it", config)
    with pytest.raises(EvidenceError, match=r"rainfusion_executor \('flash' here, 'auto' in the row\)"):
        require(tmp_path, KNOWN, MADE, [None], "qualify it", config | {"rainfusion_executor": "flash"})
