"""Check that documentation calls nothing validated without a row that says so.

A paragraph, list item or table row that says "validated" or "qualified" of something is a claim: it links to a row,
`[evidence](evidence.md#row-ID)`, and that row's state is `validated`. Speaking of "a validated row" claims nothing.
Every link to a row has to lead to one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from vllm_omni_diffusion_compile.evidence import read_rows

ROOT = Path(__file__).resolve().parents[2]
# These are rendered: what they say is checked where it is rendered from.
_RENDERED = ("evidence.md", "grafts.md", "options.md")
_CLAIM = re.compile(r"\b(validated|qualified)\b(?!\s+rows?\b)", re.IGNORECASE)
_LINK = re.compile(r"\]\((?:docs/)?evidence\.md#([^)\s]*)\)")
_FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2[ ]*$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
# Where a paragraph, an item or a table row ends.
_BLOCK = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*+]|\d+\.|\|)\s)")


def check(text: str, states: Mapping[str, str]) -> Iterator[tuple[int, str]]:
    """Yield what is wrong with a page: the line, and what to do.

    Args:
        text: The page.
        states: State of each row by its id.
    """
    text = _FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text)
    start = 0
    for end in [*(block.start() for block in _BLOCK.finditer(text)), len(text)]:
        block = text[start:end]
        line = text.count("\n", 0, start + len(block) - len(block.lstrip())) + 1
        start = end
        linked = [target.removeprefix("row-") for target in _LINK.findall(block)]
        for row in linked:
            if row not in states:
                yield line, f"links to evidence.md#row-{row}, and there is no such row"
        claim = _CLAIM.search(_CODE.sub("", block))
        if claim is None:
            continue
        if not linked:
            yield (
                line,
                f"says {claim[0]!r} and links to no row; add [evidence](evidence.md#row-ID)",
            )
        for row in linked:
            if states.get(row, "validated") != "validated":
                yield line, f"says {claim[0]!r}, and row {row!r} is {states[row]!r}"


def main() -> int:
    """Check README.md and docs/*.md; return the exit status."""
    states = {row.id: row.state for row in read_rows(ROOT / "docs" / "evidence")}
    pages = [ROOT / "README.md", *sorted(page for page in (ROOT / "docs").glob("*.md") if page.name not in _RENDERED)]
    found = [
        f"{page.relative_to(ROOT)}:{line}: {what}"
        for page in pages
        for line, what in check(page.read_text(encoding="utf-8"), states)
    ]
    print("\n".join(found) or f"{len(pages)} pages, {len(states)} rows: every claim has its row")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
