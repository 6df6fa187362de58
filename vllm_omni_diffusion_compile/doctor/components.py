"""Declared component paths that resolve to nothing, as far as a pipeline's code tells without its weights."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field

from vllm_omni_diffusion_compile.doctor.finding import Finding

# Where a pipeline declares what it consists of. Source: `SupportsComponentDiscovery` in
# vllm_omni/diffusion/models/interface.py.
_DECLARATIONS = ("_dit_modules", "_vae_modules", "_encoder_modules")
# Calls after which any attribute may be there.
_BY_NAME = frozenset({"setattr", "add_module", "register_module", "register_modules", "__setattr__"})


@dataclass
class _Code:
    """What the code of a pipeline class and its bases assigns to `self`."""

    attributes: set[str] = field(default_factory=set)
    by_name: bool = False
    """Something is assigned whose name the code does not show."""
    redeclared: set[str] = field(default_factory=set)
    """Declarations that an instance makes for itself."""


def check_components(pipeline: type) -> Iterator[Finding]:
    """Check every path that a pipeline class declares.

    Args:
        pipeline: Its class. It is read, not made.
    """
    code = _read(pipeline)
    for declaration in _DECLARATIONS:
        paths = getattr(pipeline, declaration, None)
        name = f"{pipeline.__name__}.{declaration}"
        if paths is None or isinstance(paths, property):
            yield Finding.ok(name, "not declared by the class")
        else:
            for path in dict.fromkeys(paths):
                yield _judged(name, str(path), pipeline, code, declaration)


def _judged(name: str, path: str, pipeline: type, code: _Code, declaration: str) -> Finding:
    first, _, rest = path.partition(".")
    if first in code.attributes or hasattr(pipeline, first):
        if rest:
            return Finding.unknown(
                name, f"{path!r}: {first!r} is there; {rest!r} in it is known only when the model is loaded"
            )
        return Finding.ok(name, f"{path!r} is there")
    if code.by_name:
        return Finding.unknown(
            name,
            f"{path!r}: the pipeline sets attributes by names that its code does not "
            "show; known only when the model is loaded",
        )
    if declaration in code.redeclared:
        return Finding.unknown(
            name, f"{path!r}: the pipeline declares anew when it is made; known only when the model is loaded"
        )
    return Finding.limit(
        name,
        f"{path!r}: nothing in {pipeline.__name__} or its bases sets {first!r}",
        f"correct {declaration} in {inspect.getsourcefile(pipeline)}, or report it to vLLM-Omni: nothing of this "
        "component is compiled",
    )


def _read(pipeline: type) -> _Code:
    code = _Code()
    for cls in pipeline.__mro__:
        if cls is object or cls.__module__.partition(".")[0] == "torch":
            continue
        code.attributes.update(getattr(cls, "__annotations__", {}).keys() - set(_DECLARATIONS))
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
        except (OSError, TypeError, SyntaxError):
            code.by_name = True  # no source to read
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
                code.attributes.add(node.attr)
                code.redeclared.update({node.attr} & set(_DECLARATIONS))
            elif isinstance(node, ast.Call) and _called(node) in _BY_NAME and _on_self(node):
                _take_name(code, node)
    return code


def _take_name(code: _Code, call: ast.Call) -> None:
    """Take the name that a call such as `setattr(self, "vae", ...)` shows, or note that it shows none."""
    names = [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
    names += [keyword.arg for keyword in call.keywords if keyword.arg is not None]
    shown = {name for name in names if isinstance(name, str)}
    code.attributes |= shown
    code.by_name |= not shown


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _on_self(call: ast.Call) -> bool:
    owner = call.func.value if isinstance(call.func, ast.Attribute) else (call.args[0] if call.args else None)
    return _is_self(owner) or (isinstance(owner, ast.Call) and _called(owner) == "super")


def _is_self(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"
