from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.pre_commit.rows import field_row, row
from tools.pre_commit import check_budget
from tools.pre_commit.check_budget import earlier_budgets, judge, main, private_names

NAMES = {"vllm_omni.data:_a", "vllm_omni.data:_b"}


@pytest.fixture
def budget(tmp_path: Path) -> Path:
    path = tmp_path / "repository" / "graft_budget.toml"
    path.parent.mkdir()
    return path


@pytest.fixture
def git(budget: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A repository of its own: neither the configuration nor the variables of the machine reach it."""
    for name in ("GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", "/dev/null")

    def run(*arguments: str) -> None:
        command = ["git", "-c", "user.name=n", "-c", "user.email=n@example.org", "-C", str(budget.parent), *arguments]
        subprocess.run(command, check=True, capture_output=True)

    run("init", "--initial-branch=main")
    return run


def commit(git: Callable[..., None], budget: Path, value: int) -> None:
    budget.write_text(f"private_names = {value}\n")
    git("add", budget.name)
    git("commit", "--allow-empty", "-m", f"budget {value}")


def test_private_parts_are_counted_once_each() -> None:
    rows = [
        row("vllm_omni._private.module:public"),
        row("vllm_omni.data:_Class.__init__"),
        row("vllm_omni.data:_Class.method"),
        field_row("vllm_omni.data:_Class"),
        row("vllm_omni.data:Class._method"),
        row("vllm_omni.data:_Class._method"),
    ]
    assert private_names(rows) == {
        "vllm_omni._private",
        "vllm_omni.data:_Class",
        "vllm_omni.data:Class._method",
        "vllm_omni.data:_Class._method",
    }


def test_public_and_dunder_names_are_not_counted() -> None:
    assert private_names([row("vllm_omni.data:Class.__post_init__"), row("vllm_omni.data:f"), field_row()]) == set()


def test_over_budget_fails_with_the_names() -> None:
    passed, message = judge(NAMES, 1, {})
    assert not passed
    assert "take 1 fewer" in message
    assert all(name in message for name in NAMES)


def test_at_budget_passes() -> None:
    assert judge(NAMES, 2, {"HEAD": 2})[0]


def test_under_budget_passes_and_says_by_how_much() -> None:
    passed, message = judge(NAMES, 5, {"HEAD": 5})
    assert passed
    assert "slack by 3" in message


def test_a_higher_budget_than_before_fails() -> None:
    passed, message = judge(NAMES, 3, {"HEAD": 2})
    assert not passed
    assert "HEAD has 2" in message


def test_budget_is_compared_with_head_before_the_commit(budget: Path, git: Callable[..., None]) -> None:
    commit(git, budget, 3)
    budget.write_text("private_names = 4\n")
    assert earlier_budgets(budget) == {"HEAD": 3}


def test_budget_is_compared_with_the_parent_after_the_commit(budget: Path, git: Callable[..., None]) -> None:
    commit(git, budget, 3)
    commit(git, budget, 4)
    assert earlier_budgets(budget) == {"HEAD": 4, "HEAD^": 3}


def test_budget_is_compared_with_where_the_branch_started(budget: Path, git: Callable[..., None]) -> None:
    commit(git, budget, 3)
    git("update-ref", "refs/remotes/origin/main", "HEAD")
    git("symbolic-ref", "refs/remotes/origin/HEAD", "refs/remotes/origin/main")
    commit(git, budget, 4)
    commit(git, budget, 4)
    assert earlier_budgets(budget) == {"HEAD": 4, "HEAD^": 4, "the merge base": 3}


def test_without_earlier_commits_there_is_nothing_to_compare_with(budget: Path, git: Callable[..., None]) -> None:
    budget.write_text("private_names = 4\n")
    assert earlier_budgets(budget) == {}


def test_exit_status(
    budget: Path, git: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_budget, "all_rows", lambda: [row("vllm_omni.data:_a"), row("vllm_omni.data:_b")])
    commit(git, budget, 2)
    assert main(budget) == 0
    budget.write_text("private_names = 1\n")
    assert main(budget) == 1
    budget.write_text("private_names = 3\n")
    assert main(budget) == 1
    assert "only ever goes down" in capsys.readouterr().out
