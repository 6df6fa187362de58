"""The troubleshooting page quotes what the source says, and leaves no warning out."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import DOCS
from tests.docs.templates import Template, templates, warnings

PAGE = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
# What stands in the first column.
QUOTED = [
    span
    for row in re.findall(r"^\| (`[^|]+`) \|", PAGE, re.MULTILINE)
    for span in re.findall(r"`([^`]+)`", row)
]  # fmt: skip


@pytest.mark.parametrize("quoted", QUOTED)
def test_what_is_quoted_is_in_the_source(quoted: str) -> None:
    assert any(template.holds(quoted) for template in templates(fewest=8)), f"no message of the package reads: {quoted}"


@pytest.mark.parametrize("warning", warnings(), ids=lambda warning: warning.where)
def test_a_warning_is_explained(warning: Template) -> None:
    assert any(warning.holds(quoted) for quoted in QUOTED), (
        f"docs/troubleshooting.md does not have what {warning.where} logs: {warning.text!r}; "
        "say there what it means and what to do"
    )


def test_a_row_says_what_to_do() -> None:
    rows = [line.split(" | ") for line in PAGE.splitlines() if line.startswith("| `")]
    assert rows
    for row in rows:
        assert len(row) == 3, row
