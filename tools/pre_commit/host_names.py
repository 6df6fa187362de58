"""Which names of a Python source are vLLM-Omni's or vLLM's, found without importing anything."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

HOSTS = ("vllm", "vllm_omni")

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
# Methods and functions that hand out what a container holds.
_VIEWS = frozenset({"values", "items", "copy"})
_ITERATORS = frozenset({"dict", "enumerate", "iter", "list", "reversed", "set", "sorted", "tuple", "zip"})
_MODULE_TABLE = "sys.modules"
# Calls whose result is the argument itself, or a live part of it.
_TRANSPARENT = frozenset({"getattr", "vars", "type", "getattr_static", "getmodule", "unwrap", "reload", "cast"})


def dotted(node: ast.AST) -> str | None:
    """Return `a.b.c` for a chain of attributes on a name; None for anything else."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def is_host(module: str) -> bool:
    """Whether a dotted name lies in vLLM-Omni or vLLM."""
    return module.partition(".")[0].partition(":")[0] in HOSTS


class Names:
    """What the names in a module stand for, as far as the host is concerned.

    Scopes are respected, the order of statements is not: a name that is the host's anywhere in its scope is the host's
    all over it. That errs on the side of a finding.

    Args:
        tree: The module.
    """

    def __init__(self, tree: ast.Module) -> None:
        self._scope_of: dict[ast.AST, ast.AST] = {}
        self._parent: dict[ast.AST, ast.AST | None] = {tree: None}
        # Per scope: its own names, and those among them that are the host's, with what they stand for.
        self._bound: dict[ast.AST, set[str]] = {tree: set()}
        self._host: dict[ast.AST, dict[str, str]] = {tree: {}}
        # The same for lists, dicts and tuples of this package that hold something of the host.
        self._holding: dict[ast.AST, dict[str, str]] = {tree: {}}
        self._strings: dict[str, str] = {}
        self._modules: dict[str, str] = {}  # local name of an import that is not the host's -> what it is
        self._attributes: dict[str, str] = {}  # `self.runner`, as written, wherever in the file
        self._functions: dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]] = {}
        self._returns: dict[ast.AST, list[ast.expr]] = {}
        self._place(tree, tree)
        nodes = list(ast.walk(tree))
        for node in nodes:
            self._declare(node)
        while True:
            before = self._size()
            for node in nodes:
                self._learn(node)
            if self._size() == before:
                break

    def host(self, node: ast.AST) -> str | None:
        """Return what of the host an expression stands for, or None."""
        if isinstance(node, ast.Name):
            return self._look_up(node)
        if isinstance(node, ast.Attribute):
            written = dotted(node)
            if written is not None and written in self._attributes:
                return self._attributes[written]
            base = self.host(node.value)
            return None if base is None else f"{base}.{node.attr}"
        if isinstance(node, ast.Subscript):
            entry = self.host_module_entry(node)
            base = self.host(node.value) if entry is None else None
            if base is not None:
                return f"{base}[...]"
            return entry or self.contents(node.value)
        if isinstance(node, ast.Call):
            return self._host_of_call(node)
        if isinstance(node, (ast.NamedExpr, ast.Starred, ast.Await)):
            return self.host(node.value)
        if isinstance(node, ast.IfExp):
            return self._first((node.body, node.orelse))
        if isinstance(node, ast.BoolOp):
            return self._first(node.values)
        return None

    def contents(self, node: ast.AST) -> str | None:
        """Return what of the host an expression holds, as a tuple, a dict or an iterator does, or None."""
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            return self._first(node.elts) or self._first_contents(node.elts)
        if isinstance(node, ast.Dict):
            return self._first(node.values) or self._first_contents(node.values)
        if isinstance(node, ast.Name):
            return self._holding[self._owner(node)].get(node.id)
        if isinstance(node, ast.Starred):
            return self.contents(node.value)
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr in _VIEWS:
                return self.host(node.func.value) or self.contents(node.func.value)
            if isinstance(node.func, ast.Name) and node.func.id in _ITERATORS:
                return self._first(node.args) or self._first_contents(node.args)
            return self._first_contents(self._returned(node))
        return None

    def written(self, node: ast.AST) -> str:
        """Return a dotted name with its first part replaced by what was imported under it."""
        first, dot, rest = (dotted(node) or "").partition(".")
        return self._modules.get(first, first) + dot + rest

    def host_module_entry(self, node: ast.AST) -> str | None:
        """Return the module that `sys.modules[...]` speaks of, if it is the host's or nobody knows."""
        if isinstance(node, ast.Subscript) and self._is_module_table(node.value):
            return self._module_named(node.slice)
        return None

    def host_module_key(self, call: ast.Call) -> str | None:
        """Return the host's module that `sys.modules.pop("...")` or a sibling of it changes."""
        if not isinstance(call.func, ast.Attribute) or not self._is_module_table(call.func.value) or not call.args:
            return None
        key = call.args[0]
        if isinstance(key, ast.Dict):
            return next((name for part in key.keys if part is not None and (name := self._module_named(part))), None)
        return self._module_named(key)

    def host_path(self, node: ast.AST) -> str | None:
        """Return a string that names something of the host, such as the target of `unittest.mock.patch`."""
        text = self._string(node)
        return text if text is not None and is_host(text) else None

    def _first(self, nodes: Iterable[ast.AST]) -> str | None:
        return next((found for node in nodes if (found := self.host(node)) is not None), None)

    def _first_contents(self, nodes: Iterable[ast.AST]) -> str | None:
        return next((found for node in nodes if (found := self.contents(node)) is not None), None)

    def _host_of_call(self, call: ast.Call) -> str | None:
        function = self.written(call.func)
        last = function.rpartition(".")[2]
        if last in ("import_module", "__import__") and call.args:
            return self._module_named(call.args[0])
        if isinstance(call.func, ast.Attribute):
            if call.func.attr == "get" and self._is_module_table(call.func.value) and call.args:
                return self._module_named(call.args[0])
            if call.func.attr in ("get", "pop", "setdefault", "__getitem__"):
                return self.host(call.func.value) or self.contents(call.func.value)
        if last == "next":
            return self._first(call.args) or self._first_contents(call.args)
        if last in _TRANSPARENT:
            return self._first(call.args)
        return self._first(self._returned(call))

    def _returned(self, call: ast.Call) -> list[ast.expr]:
        """Return what the functions of this file that a call may mean return."""
        return [value for function in self._called(call) for value in self._returns[function]]

    def _called(self, call: ast.Call) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else dotted(call.func)
        return self._functions.get(name or "", [])

    def _module_named(self, node: ast.AST) -> str | None:
        """Return a module by the expression of its name; one that cannot be told might be the host's."""
        text = self._string(node)
        if text is not None:
            return text if is_host(text) else None
        if isinstance(node, ast.Name) and node.id == "__name__":
            return None
        return f"the module {ast.unparse(node)}"

    def _string(self, node: ast.AST) -> str | None:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        if isinstance(node, ast.Name):
            return self._strings.get(node.id)
        if isinstance(node, ast.JoinedStr):
            parts = [self._string(part.value if isinstance(part, ast.FormattedValue) else part) for part in node.values]
            # The start alone says whose it is.
            return None if not parts or parts[0] is None else "".join(part or "..." for part in parts)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            left = self._string(node.left)
            return None if left is None else left + (self._string(node.right) or "...")
        return None

    def _is_module_table(self, node: ast.AST) -> bool:
        return self.written(node) == _MODULE_TABLE

    # What follows builds the tables.

    def _place(self, node: ast.AST, scope: ast.AST) -> None:
        self._scope_of[node] = scope
        inner = scope
        if isinstance(node, (*_FUNCTIONS, *_COMPREHENSIONS, ast.ClassDef)):
            inner = node
            # Functions do not see the names of the class around them.
            outer = scope
            while isinstance(outer, ast.ClassDef) and not isinstance(node, ast.ClassDef):
                above = self._parent[outer]
                assert above is not None
                outer = above
            self._parent[node] = outer
            self._bound[node], self._host[node], self._holding[node] = set(), {}, {}
        outside: set[ast.AST] = set()
        if isinstance(node, _FUNCTIONS):
            outside = {*node.args.defaults, *(default for default in node.args.kw_defaults if default is not None)}
            self._bound[node] |= {argument.arg for argument in _arguments(node)}
            if not isinstance(node, ast.Lambda):
                outside |= set(node.decorator_list)
        elif isinstance(node, ast.ClassDef):
            outside = {*node.bases, *node.keywords, *node.decorator_list}
        for child in ast.iter_child_nodes(node):
            self._place(child, scope if child in outside else inner)

    def _declare(self, node: ast.AST) -> None:
        scope = self._scope_of[node]
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            self._bound[scope].add(node.id)
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            self._bound[scope] -= set(node.names)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            self._bound[scope].add(node.name)
            if not isinstance(node, ast.ClassDef):
                self._functions.setdefault(node.name, []).append(node)
                self._returns.setdefault(node, [])
        elif isinstance(node, ast.Return) and node.value is not None:
            self._returns.setdefault(scope, []).append(node.value)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                stands_for = alias.name if alias.asname else name
                self._bind_import(scope, name, stands_for)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                module = "." * node.level + (node.module or "")
                self._bind_import(scope, alias.asname or alias.name, f"{module}.{alias.name}")
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            text = self._string(node.value)
            if text is not None:
                self._strings[node.targets[0].id] = text

    def _bind_import(self, scope: ast.AST, name: str, stands_for: str) -> None:
        self._bound[scope].add(name)
        if is_host(stands_for):
            self._host[scope][name] = stands_for
        else:
            self._modules[name] = stands_for

    def _learn(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind(target, node.value)
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            self._bind(node.target, node.value)
        elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
            self._bind_element(node.target, node.iter)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                if item.optional_vars is not None:
                    self._bind(item.optional_vars, item.context_expr)
        elif isinstance(node, _FUNCTIONS):
            self._learn_parameters(node)
        elif isinstance(node, ast.Call):
            for function in self._called(node):
                self._learn_arguments(function, node)

    def _bind(self, target: ast.AST, value: ast.AST) -> None:
        parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else ()
        if parts and isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(parts):
            for part, element in zip(parts, value.elts, strict=True):
                self._bind(part, element)
        else:
            self._record(target, self.host(value), self.contents(value))

    def _bind_element(self, target: ast.AST, iterable: ast.AST) -> None:
        inside = self.host(iterable) or self.contents(iterable)
        self._record(target, inside, inside if isinstance(iterable, ast.Call) else None)

    def _record(self, target: ast.AST, stands_for: str | None, holds: str | None) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            for part in target.elts:
                self._record(part, stands_for or holds, None)
        elif isinstance(target, ast.Starred):
            self._record(target.value, None, stands_for or holds)
        elif isinstance(target, ast.Name):
            scope = self._owner(target)
            if stands_for is not None:
                self._host[scope].setdefault(target.id, stands_for)
            if holds is not None:
                self._holding[scope].setdefault(target.id, holds)
        elif stands_for is not None and (written := dotted(target)) is not None:
            self._attributes.setdefault(written, stands_for)

    def _learn_parameters(self, function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        host = self._host[function]
        for argument in _arguments(function):
            # The only modules that this package hands around are the host's.
            if argument.annotation is not None and "ModuleType" in ast.unparse(argument.annotation):
                host.setdefault(argument.arg, f"the module {argument.arg}")
        positional = [*function.args.posonlyargs, *function.args.args]
        pairs = list(zip(reversed(positional), reversed(function.args.defaults), strict=False))
        pairs += [
            (a, d) for a, d in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True) if d is not None
        ]
        for argument, default in pairs:
            stands_for = self.host(default)
            if stands_for is not None:
                host.setdefault(argument.arg, stands_for)

    def _learn_arguments(self, function: ast.FunctionDef | ast.AsyncFunctionDef, call: ast.Call) -> None:
        positional = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
        if isinstance(call.func, ast.Attribute) and positional[:1] in (["self"], ["cls"]):
            positional = positional[1:]
        known = {argument.arg for argument in _arguments(function)}
        given = [
            *zip(positional, call.args, strict=False),
            *((keyword.arg, keyword.value) for keyword in call.keywords),
        ]
        for name, value in given:
            stands_for = self.host(value)
            if name in known and stands_for is not None:
                self._host[function].setdefault(str(name), stands_for)

    def _look_up(self, name: ast.Name) -> str | None:
        return self._host[self._owner(name)].get(name.id)

    def _owner(self, name: ast.Name) -> ast.AST:
        """Return the scope that a name belongs to."""
        scope = self._scope_of[name]
        for candidate in self._enclosing(scope):
            if name.id in self._bound[candidate]:
                return candidate
        return next(reversed(list(self._enclosing(scope))))

    def _enclosing(self, scope: ast.AST) -> Iterator[ast.AST]:
        current: ast.AST | None = scope
        while current is not None:
            yield current
            current = self._parent[current]

    def _size(self) -> int:
        return len(self._attributes) + sum(
            len(names) for table in (self._host, self._holding) for names in table.values()
        )


def _arguments(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> list[ast.arg]:
    found = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return [*found, *(extra for extra in (function.args.vararg, function.args.kwarg) if extra is not None)]
