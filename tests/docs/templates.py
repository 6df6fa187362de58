"""The messages that the package's source can print, as patterns."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "vllm_omni_diffusion_compile"
# What a message puts in for a value: %s and the like, or a replacement field of an f-string.
_HOLE = "\0"
_CONVERSION = re.compile(r"%(?:[-+ #0]*\d*(?:\.\d+)?[sdrfgxi]|%)")


@dataclass(frozen=True)
class Template:
    """A message in the source.

    Args:
        where: File and line.
        text: The message; a null character stands for each value.
    """

    where: str
    text: str

    @property
    def pattern(self) -> re.Pattern[str]:
        """Matches the message with any values, white space taken together."""
        parts = (re.escape(" ".join(f"<{part}>".split())[1:-1]) for part in self.text.split(_HOLE))
        return re.compile(".*?".join(parts), re.DOTALL)

    def holds(self, quoted: str) -> bool:
        """Whether the message has the pieces of a quotation, in order; `...` and NAMES stand for values."""
        plain = " ".join(self.text.split())
        at = 0
        for piece in map(str.strip, re.split(r"\.\.\.|\b[A-Z][A-Z_]+\b(?![a-z_])", quoted)):
            if len(piece) < 2:
                continue
            found = plain.find(piece, at)
            if found < 0:
                return False
            at = found + len(piece)
        return True


@cache
def templates(fewest: int = 16) -> tuple[Template, ...]:
    """Every text of the package that may be a message; documentation strings are none.

    Args:
        fewest: Letters of its own that it has to have: one with fewer would match anything.
    """
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        skip = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                skip |= {id(part) for part in node.values}
            if id(node) not in skip and (text := _text(node)) is not None and len(_letters(text)) >= fewest:
                found.append(Template(f"{path.relative_to(PACKAGE)}:{node.lineno}", text))  # type: ignore[attr-defined]
    return tuple(found)


def warnings() -> tuple[Template, ...]:
    """The messages that are logged as a warning or an error."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and node.args):
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            levels = {"warning", "warning_once", "error", "exception"}
            # Features warn through what they are given, see `compile.cache.working`.
            told = {"warn", "_warn", "_say_once"}
            # `log(level, text)` in the report of events: a warning on the first rank.
            message = node.args[called == "log" :][:1]
            if called in levels | told | {"log"} and message and (text := _text(message[0])) is not None:
                found.append(Template(f"{path.relative_to(PACKAGE)}:{node.lineno}", text))
    return tuple(found)


def _text(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _CONVERSION.sub(lambda match: "%" if match[0] == "%%" else _HOLE, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else _HOLE for part in node.values)
    return None


def _letters(text: str) -> str:
    return re.sub(r"[^A-Za-z]", "", text)
