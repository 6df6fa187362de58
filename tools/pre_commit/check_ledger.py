"""Check that every graft says why it is there and what will make it unnecessary.

Run as `python -m tools.pre_commit.check_ledger`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from tools.pre_commit.ledgers import all_rows, qualified_name
from vllm_omni_diffusion_compile.upstream.graft import FieldGraft, Graft

_LINK = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+/(pull|issues)/\d+")
_NONE = re.compile(r"none( yet)?: \S+( \S+)+")
_PLACEHOLDER = re.compile(r"\b(TODO|TBD|FIXME|XXX)\b|\?\?")
_FEWEST_WORDS = 3


def findings(rows: Iterable[Graft]) -> Iterator[str]:
    """Yield what is wrong with the rows, one line each."""
    seen: dict[tuple[object, ...], str] = {}
    for row in rows:
        name = qualified_name(row)
        yield from (f"{name}: {problem}" for problem in _row_findings(row))
        identity = (name, row.releases, None if isinstance(row, FieldGraft) else row.make)
        if identity in seen:
            yield f"{name}: the same change for the same releases is in the ledger twice; drop one row"
        seen[identity] = name


def _row_findings(row: Graft) -> Iterator[str]:
    if not re.fullmatch(r"\w+(\.\w+)*:\w+(\.\w+)*", row.target):
        yield f"target is {row.target!r}, expected `package.module:Qualified.name`"
    if not _is_sentence(row.why):
        yield f"why is {row.why!r}, expected a sentence: what goes wrong without this graft, with a full stop"
    if not (_LINK.fullmatch(row.upstream) or _NONE.fullmatch(row.upstream)):
        yield (
            f"upstream is {row.upstream!r}, expected a link to a pull request or an issue on GitHub, or 'none: ' or "
            "'none yet: ' and the reason"
        )
    if not _is_clause(row.remove_when):
        yield f"remove_when is {row.remove_when!r}, expected words to be read after 'remove when', without a full stop"
    for attribute in ("why", "upstream", "remove_when"):
        if _PLACEHOLDER.search(getattr(row, attribute)):
            yield f"{attribute} holds a placeholder; say it"
    try:
        SpecifierSet(row.releases)
    except InvalidSpecifier:
        yield f"releases is {row.releases!r}, expected a version specifier such as '<0.30', or nothing"


def _is_sentence(text: str) -> bool:
    words = text.split()
    # A name from code or a flag may begin a sentence as it is written (vLLM, --omni, dynamic=None); a plain word is
    # capitalised.
    plain = bool(words) and words[0].isalpha() and words[0].islower()
    return len(words) >= _FEWEST_WORDS and text == text.strip() and text.endswith(".") and not plain


def _is_clause(text: str) -> bool:
    return len(text.split()) >= _FEWEST_WORDS and text == text.strip() and not text.endswith(".")


def main() -> int:
    """Print every finding; return the exit status."""
    found = list(findings(all_rows()))
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
