"""What the README and the pages of docs/ show: fenced blocks, and the commands in them and in the text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", *sorted(DOCS.glob("*.md")))

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^ *```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
# A code span in the text is a command where it begins with one of these and says more than the program's name.
_PROGRAMS = re.compile(r"(?:[A-Z_]+=\S+ )*(?:vllm serve|vllm-omni-compile|python -m|make|pip|uv|curl|git) \S")
_ASSIGNMENT = re.compile(r"[A-Z_][A-Z_0-9]*=")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Args:
        page: File name of the page.
        line: Of its first line of text, from 1.
        language: What stands behind the fence; empty if nothing does.
        text: Its lines, without the fence's indentation.
    """

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A command that a page shows.

    Args:
        page: File name of the page.
        line: Where it stands, from 1.
        text: As it is written, its continuation lines joined.
        inline: Whether it stands in the text, where part of a command may be all that is meant.
        output: What a `console` block shows below it; None where nothing is shown.
    """

    page: str
    line: int
    text: str
    inline: bool = False
    output: str | None = None
    words: tuple[str, ...] = field(init=False)
    environment: dict[str, str] = field(init=False, hash=False)

    def __post_init__(self) -> None:
        words = shlex.split(self.text, comments=True)
        tokens = shlex.shlex(self.text, posix=False, punctuation_chars=True)
        joined = {"|", "||", "&&", ";", "&", ">", "<"}.intersection(tokens)
        if joined and not self.inline:
            raise ValueError(f"{self}: found {sorted(joined)}, expected single commands, which the tests can run")
        given = {}
        while words and _ASSIGNMENT.match(words[0]):
            name, _, value = words.pop(0).partition("=")
            given[name] = value
        object.__setattr__(self, "words", tuple(words))
        object.__setattr__(self, "environment", given)

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        indent = len(match["indent"])
        lines = [line[indent:] for line in match["text"].splitlines()]
        found.append(Block(page.name, _line(text, match.start("text")), match["language"], "\n".join(lines)))
    return found


def commands(page: Path) -> list[Command]:
    """Return the commands of a page: those of its shell blocks, and those that its text names."""
    found = [command for block in blocks(page) for command in _commands_of(block)]
    text = page.read_text(encoding="utf-8")
    for hidden in (_FENCE, _COMMENT):
        text = hidden.sub(lambda match: "\n" * match[0].count("\n"), text)
    for match in _SPAN.finditer(text):
        span = match[1].replace("\\|", "|")
        if _PROGRAMS.match(span):
            found.append(Command(page.name, _line(text, match.start()), span, inline=True))
    return sorted(found, key=lambda command: command.line)


def _commands_of(block: Block) -> Iterator[Command]:
    if block.language == "bash":
        yield from (Command(block.page, block.line + at, text) for at, text in _joined(block.text))
    elif block.language == "console":
        first, *rest = re.split(r"^\$ ", block.text, flags=re.MULTILINE)
        assert not first, f"{block}: expected a console block to begin with a command, `$ ...`"
        line = block.line
        for part in rest:
            text, _, output = part.partition("\n")
            yield Command(block.page, line, text, output=output)
            line += part.count("\n")


def _joined(text: str) -> Iterator[tuple[int, str]]:
    """Yield each command of a shell block with the number of its line, from 0."""
    begun, start = "", 0
    for at, line in enumerate(text.splitlines()):
        start = start if begun else at
        begun = f"{begun} {line.strip()}".strip()
        if begun.endswith("\\"):
            begun = begun[:-1].rstrip()
            continue
        if begun and not begun.startswith("#"):
            yield start, begun
        begun = ""
    assert not begun, f"a command ends in a backslash: {begun}"


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1
