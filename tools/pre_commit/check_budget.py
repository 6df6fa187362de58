"""Check how many private names of the host are grafted: never more than the budget, and the budget never grows.

Run as `python -m tools.pre_commit.check_budget`. A private name can change in any release without notice, so each of
them is a debt. The budget is in `graft_budget.toml`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import tomllib

from tools.pre_commit.ledgers import all_rows
from vllm_omni_diffusion_compile.upstream.graft import Graft

BUDGET = Path(__file__).with_name("graft_budget.toml")


def private_names(rows: Iterable[Graft]) -> set[str]:
    """Return the private modules, classes and attributes that the rows go through or assign to.

    A name counts once however many rows use it. Dunder names are Python's, not private.
    """
    found: set[str] = set()
    for row in rows:
        parts = row.module.split(".")
        found |= {".".join(parts[: end + 1]) for end in range(1, len(parts)) if _is_private(parts[end])}
        path = row.name.split(".")
        found |= {f"{row.module}:{'.'.join(path[: end + 1])}" for end in range(len(path)) if _is_private(path[end])}
    return found


def _is_private(part: str) -> bool:
    return part.startswith("_") and not (part.startswith("__") and part.endswith("__"))


def judge(names: set[str], budget: int, earlier: Mapping[str, int]) -> tuple[bool, str]:
    """Compare a count with its budget, and the budget with earlier ones.

    Args:
        names: Private names that are grafted.
        budget: How many there may be.
        earlier: Budgets of earlier commits, by the commit's name.

    Returns:
        Whether all is well, and what to tell the reader.
    """
    for commit, value in earlier.items():
        if budget > value:
            return False, (
                f"the budget is {budget}, but {commit} has {value}, and it only ever goes down: set it back, and take "
                "fewer private names (a public seam, an entry point, a wrap further out)"
            )
    count = f"{len(names)} private names are grafted"
    if len(names) > budget:
        listing = "".join(f"\n  {name}" for name in sorted(names))
        return False, f"{count}, the budget is {budget}; take {len(names) - budget} fewer of:{listing}"
    if len(names) < budget:
        return True, f"{count}, the budget of {budget} is slack by {budget - len(names)}; lower it"
    return True, f"{count}, as many as the budget allows"


def read_budget(text: str) -> int:
    """Return the budget that a `graft_budget.toml` states."""
    return int(tomllib.loads(text)["private_names"])


def earlier_budgets(path: Path) -> dict[str, int]:
    """Return the budgets at HEAD, at its first parent and where this branch left the main one, where git has them."""
    budgets: dict[str, int] = {}
    commits = {"HEAD": "HEAD", "HEAD^": "HEAD^"}
    base = _git(path.parent, "merge-base", "HEAD", "origin/HEAD")
    if base is not None:
        commits["the merge base"] = base.strip()
    for name, commit in commits.items():
        text = _git(path.parent, "show", f"{commit}:./{path.name}")
        if text is not None:
            budgets[name] = read_budget(text)
    return budgets


def _git(folder: Path, *arguments: str) -> str | None:
    result = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    return result.stdout if result.returncode == 0 else None


def main(path: Path = BUDGET) -> int:
    """Print the verdict; return the exit status."""
    passed, message = judge(private_names(all_rows()), read_budget(path.read_text()), earlier_budgets(path))
    print(message)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
