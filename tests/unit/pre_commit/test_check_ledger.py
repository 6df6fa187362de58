from __future__ import annotations

import pytest

from tests.unit.pre_commit.rows import field_row, row, unchanged
from tools.pre_commit import check_ledger
from tools.pre_commit.check_ledger import findings, main
from vllm_omni_diffusion_compile.upstream.graft import Graft

BAD = {
    "no why": (row(why=""), "why is ''"),
    "why without a full stop": (row(why="The release drops a name"), "why is"),
    "why that starts small": (row(why="it drops a name in silence."), "why is"),
    "why of two words": (row(why="Drops it."), "why is"),
    "no upstream": (row(upstream=""), "upstream is ''"),
    "none without a reason": (row(upstream="none yet"), "upstream is 'none yet'"),
    "none with an empty reason": (row(upstream="none: "), "upstream is"),
    "a link to a repository": (row(upstream="https://github.com/vllm-project/vllm-omni"), "upstream is"),
    "no remove_when": (row(remove_when=""), "remove_when is ''"),
    "remove_when of one word": (row(remove_when="later"), "remove_when is 'later'"),
    "remove_when with a full stop": (row(remove_when="the release refuses the name."), "remove_when is"),
    "placeholder": (row(why="TODO say what goes wrong here."), "why holds a placeholder"),
    "target without a name": (row("vllm_omni.diffusion.data"), "target is"),
    "releases that are none": (row(releases="0.28"), "releases is '0.28'"),
}

GOOD = {
    "a pull request": row(),
    "an issue": row(upstream="https://github.com/vllm-project/vllm/issues/12"),
    "none with a reason": row(upstream="none: 0.30.0 refuses it"),
    "none yet with a reason": row(upstream="none yet: it has to be measured first"),
    "why that starts with code": row(why="dynamic=None compiles decode twice."),
    "why that starts with a product": row(why="vLLM-Omni drops a name in silence."),
    "why that starts with a flag": row(why="--omni is not seen by the parser."),
    "releases": row(releases=">=0.28,<0.30"),
    "a field": field_row(),
}


@pytest.mark.parametrize(("bad", "expected"), BAD.values(), ids=BAD.keys())
def test_row_that_does_not_explain_itself_is_found(bad: Graft, expected: str) -> None:
    found = list(findings([bad]))
    assert len(found) == 1
    assert expected in found[0]
    assert found[0].startswith(bad.target)


@pytest.mark.parametrize("good", GOOD.values(), ids=GOOD.keys())
def test_row_that_explains_itself_passes(good: Graft) -> None:
    assert list(findings([good])) == []


def test_duplicates_are_found() -> None:
    assert len(list(findings([row(), row(why="The same for another reason.")]))) == 1
    assert len(list(findings([field_row(), field_row()]))) == 1


def test_same_target_is_no_duplicate_where_the_change_or_the_releases_differ() -> None:
    def other(value: object) -> object:
        return unchanged(value)

    rows = [row(), row(make=other), row(releases="<0.30"), field_row(), field_row(name="other")]
    assert list(findings(rows)) == []


def test_exit_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(check_ledger, "all_rows", lambda: [row()])
    assert main() == 0
    monkeypatch.setattr(check_ledger, "all_rows", lambda: [row(why="")])
    assert main() == 1
    assert "why is ''" in capsys.readouterr().out
