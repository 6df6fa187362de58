"""Check that nothing but `upstream/graft.py` assigns onto vLLM-Omni or vLLM.

Run as `python -m tools.pre_commit.check_assignments [FILE...]`; without files, the whole package is checked. A file is
read, never imported: what it imports from the host is followed through aliases, attributes, loops, functions of the
same file and `sys.modules`, and every way to change such a thing is reported. What the host's callables return is not
followed: a wrapper may fill in a request that it has just made.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.pre_commit.host_names import Names

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "vllm_omni_diffusion_compile"
# The one module that assigns.
ASSIGNS = PACKAGE / "upstream" / "graft.py"
REMEDY = "make it a Graft in upstream/ledger.py (platforms/cpu_grafts.py for the CPU platform)"

# Methods that change a dict, a list, a set or an object in place.
_MUTATORS = frozenset(
    "__delattr__ __delitem__ __ior__ __setattr__ __setitem__ add append clear difference_update discard extend insert "
    "intersection_update pop popitem remove reverse setdefault sort symmetric_difference_update update".split()
)
# Functions and methods that change the first argument they are given, or what it names: the built-in ones, object's and
# type's, operator's, pytest's monkeypatch, unittest.mock.patch, wrapt.
_CHANGE_FIRST_ARGUMENT = frozenset(
    "setattr delattr __setattr__ __delattr__ setitem delitem patch wrap_function_wrapper".split()
)
_PATCHES = ("patch.object", "patch.dict", "patch.multiple")


@dataclass(frozen=True, order=True)
class Finding:
    """One assignment onto the host.

    Args:
        line: Where, counted from 1.
        what: The statement or call, as it is written.
        target: What of the host it changes.
    """

    line: int
    what: str
    target: str


def check(source: str, filename: str = "<source>") -> list[Finding]:
    """Return every assignment onto vLLM-Omni or vLLM in a module's source."""
    tree = ast.parse(source, filename)
    names = Names(tree)
    return sorted({finding for node in ast.walk(tree) for finding in _findings(node, names)})


def _findings(node: ast.AST, names: Names) -> Iterator[Finding]:
    for target in _assigned(node):
        if isinstance(target, (ast.Attribute, ast.Subscript)):
            changed = names.host(target.value) or names.host_module_entry(target)
        elif isinstance(target, ast.Name) and isinstance(node, ast.AugAssign):
            changed = names.host(target)  # `names |= {...}` changes a set or a dict in place
        else:
            changed = None
        if changed is not None:
            yield _finding(node, changed)
    if isinstance(node, ast.Call):
        changed = _changed_by_call(node, names)
        if changed is not None:
            yield _finding(node, changed)


def _assigned(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the targets of a statement that assigns or deletes, those inside of tuples too."""
    targets: list[ast.expr] = []
    if isinstance(node, (ast.Assign, ast.Delete)):
        targets = list(node.targets)
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For, ast.AsyncFor, ast.comprehension)):
        targets = [node.target]
    elif isinstance(node, (ast.With, ast.AsyncWith)):
        targets = [item.optional_vars for item in node.items if item.optional_vars is not None]
    while targets:
        target = targets.pop()
        if isinstance(target, (ast.Tuple, ast.List)):
            targets += target.elts
        elif isinstance(target, ast.Starred):
            targets.append(target.value)
        else:
            yield target


def _changed_by_call(call: ast.Call, names: Names) -> str | None:
    function = names.written(call.func)
    last = call.func.attr if isinstance(call.func, ast.Attribute) else function
    if isinstance(call.func, ast.Attribute) and last in _MUTATORS:
        changed = names.host(call.func.value) or names.host_module_key(call)
        if changed is not None:
            return changed
    if last.rpartition(".")[2] in _CHANGE_FIRST_ARGUMENT or function.endswith(_PATCHES):
        given = [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg in ("target", "in_dict"))]
        return next((changed for value in given if (changed := names.host(value) or names.host_path(value))), None)
    return None


def _finding(node: ast.AST, target: str) -> Finding:
    text = ast.unparse(node)
    # Of a loop or a `with`, the head alone.
    return Finding(line=_line(node), what=text.splitlines()[0], target=target)


def _line(node: ast.AST) -> int:
    line: int = getattr(node, "lineno", 0) or getattr(getattr(node, "target", None), "lineno", 0)
    return line


def main(arguments: Iterable[str] = ()) -> int:
    """Print every finding as `path:line: ...`; return the exit status."""
    paths = [Path(argument).resolve() for argument in arguments] or sorted(PACKAGE.rglob("*.py"))
    found = False
    for path in paths:
        if path == ASSIGNS:
            continue
        shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        for finding in check(path.read_text(encoding="utf-8"), str(path)):
            found = True
            print(f"{shown}:{finding.line}: `{finding.what}` changes {finding.target}; {REMEDY}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
