"""What a check found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "unknown", "limit", "broken"]

_EXIT_STATUS: dict[State, int] = {"ok": 0, "unknown": 0, "limit": 1, "broken": 2}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One fact, judged.

    Args:
        name: What was looked at, in the words of an operator.
        state: `ok`; `unknown`, if it cannot be known without starting a server; `limit`, if a server works, with
            something missing; `broken`, if it does not start, or serves without this package.
        found: What is there.
        remedy: What to do. A limit and a break always have one.
        group: What it is counted under where there are many alike and all is well; empty for what stands by itself.
    """

    name: str
    state: State
    found: str
    remedy: str = ""
    group: str = ""

    def __post_init__(self) -> None:
        if self.state in ("limit", "broken") and not self.remedy:
            raise ValueError(f"{self.name} is {self.state} ({self.found}), and nothing says what to do")

    @classmethod
    def ok(cls, name: str, found: str, *, group: str = "") -> Finding:
        """All is well."""
        return cls(name=name, state="ok", found=found, group=group)

    @classmethod
    def unknown(cls, name: str, found: str) -> Finding:
        """It cannot be known here."""
        return cls(name=name, state="unknown", found=found)

    @classmethod
    def limit(cls, name: str, found: str, remedy: str) -> Finding:
        """A server works, with something missing."""
        return cls(name=name, state="limit", found=found, remedy=remedy)

    @classmethod
    def broken(cls, name: str, found: str, remedy: str) -> Finding:
        """A server does not start, or serves without this package."""
        return cls(name=name, state="broken", found=found, remedy=remedy)


def exit_status(findings: Iterable[Finding]) -> int:
    """Return 0 if a server will work, 1 if it will work with a limit, 2 if it will not."""
    return max((_EXIT_STATUS[finding.state] for finding in findings), default=0)
