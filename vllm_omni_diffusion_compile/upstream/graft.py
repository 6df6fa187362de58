"""Grafts: the only place that assigns onto vLLM-Omni.

A graft is data. `check` looks at the target and changes nothing; `apply` assigns; `undo` puts back what was there. All
grafts of one target module are checked before the first of them is applied (`graft_module`), so no module is ever half
grafted.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, Literal

from packaging.specifiers import SpecifierSet

from vllm_omni_diffusion_compile.errors import GraftError
from vllm_omni_diffusion_compile.upstream.dataclass_field import NewField, rebuild, with_field

_REMEDY = (
    "install a vLLM-Omni release that this package was tested with (see README), update vllm-omni-diffusion-compile, "
    "or leave it out of VLLM_PLUGINS"
)
# Code that decorates the host's own functions; a wrapper from elsewhere is another plugin's.
_NOT_PLUGINS = (
    frozenset({"vllm", "vllm_omni", "vllm_omni_diffusion_compile", "torch", "pydantic"}) | sys.stdlib_module_names
)

_ABSENT = object()

State = Literal["applied", "native", "present", "not in this release", "already applied"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Graft:
    """One change to one attribute of vLLM-Omni.

    Args:
        target: `package.module:Qualified.name`.
        make: From what is there (None for an addition) to what takes its place. A wrapper has to call straight through
            when its feature is off, and to use `functools.wraps`.
        why: What the graft is for: the symptom it cures.
        upstream: The upstream pull request or issue that makes it unnecessary, or why there is none.
        remove_when: What has to be true before the row can go.
        parameters: Leading parameter names that a wrapped callable must have.
        value: Type of a wrapped constant, in place of `parameters`.
        adds: The target does not exist yet.
        native: Says of the target's module that the release has the capability itself; the graft then steps aside.
        present: Says that there is nothing to change: a value computed after another graft of ours has the change
            already.
        releases: The releases that have the target at all, as a version specifier; empty for every one.
    """

    target: str
    make: Callable[[Any], Any]
    why: str
    upstream: str
    remove_when: str
    parameters: tuple[str, ...] = ()
    value: type | None = None
    adds: bool = False
    native: Callable[[ModuleType], bool] | None = None
    present: Callable[[ModuleType], bool] | None = None
    releases: str = ""

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def name(self) -> str:
        return self.target.partition(":")[2]

    @property
    def distribution(self) -> str:
        """Whose release `releases` speaks of: the top-level package of the target."""
        return self.module.partition(".")[0].replace("_", "-")

    def locate(self, module: ModuleType) -> tuple[Any, str]:
        """Return the object that owns the attribute, and the attribute's own name."""
        *path, attribute = self.name.split(".")
        owner: Any = module
        for part in path:
            owner = getattr(owner, part, None)
            if owner is None:
                raise GraftError(self.target, f"{part!r} in {self.module}", "no such attribute", _REMEDY)
        return owner, attribute

    def steps_aside(self, module: ModuleType) -> bool:
        """Whether the release has the capability itself."""
        if self.native is not None and self.native(module):
            return True
        if not self.adds:
            return False
        owner, attribute = self.locate(module)
        return inspect.getattr_static(owner, attribute, None) is not None

    def check(self, module: ModuleType) -> None:
        """Raise GraftError unless the target is what this graft was written for."""
        owner, attribute = self.locate(module)
        found = inspect.getattr_static(owner, attribute, None)
        if self.adds:
            return
        if found is None:
            raise GraftError(self.target, f"attribute {attribute!r}", "none", _REMEDY)
        if self.value is not None:
            if not isinstance(found, self.value):
                raise GraftError(self.target, f"a {self.value.__name__}", _describe(found), _REMEDY)
            return
        try:
            parameters = inspect.signature(_function(found)).parameters
        except (TypeError, ValueError):
            raise GraftError(self.target, f"a callable taking {self.parameters}", _describe(found), _REMEDY) from None
        if not _takes(parameters, self.parameters):
            expected = f"parameters {self.parameters}"
            raise GraftError(self.target, expected, f"parameters {tuple(parameters)}", _REMEDY)

    def apply(self, module: ModuleType) -> Callable[[], None]:
        """Assign, and return what undoes it."""
        owner, attribute = self.locate(module)
        before = inspect.getattr_static(owner, attribute, None)
        after = _like(before, self.make(None if before is None else _function(before)))
        own = attribute in vars(owner)
        setattr(owner, attribute, after)

        def undo() -> None:
            if inspect.getattr_static(owner, attribute, None) is not after:
                raise GraftError(
                    self.target,
                    "our own wrapper",
                    _describe(inspect.getattr_static(owner, attribute, None)),
                    "somebody wrapped it after us; undo theirs first",
                )
            if own:
                setattr(owner, attribute, before)
            else:
                delattr(owner, attribute)

        return undo

    def wrapped_by(self, module: ModuleType) -> str | None:
        """Name the module of a wrapper that somebody else put on the target before us, or None."""
        owner, attribute = self.locate(module)
        return _plugin_of(inspect.getattr_static(owner, attribute, None), self.module)


@dataclass(frozen=True, kw_only=True, eq=False)
class FieldGraft(Graft):
    """One more field on a dataclass of vLLM-Omni, plain or pydantic; its target is the class.

    `fields()`, `replace`, `asdict`, pickling, equality and repr then treat the field like its neighbours.
    """

    field: NewField

    @property
    def name(self) -> str:
        return f"{self.target.partition(':')[2]}.{self.field.name}"

    def steps_aside(self, module: ModuleType) -> bool:
        owner, attribute = self.locate(module)
        return attribute in getattr(owner, "__dataclass_fields__", {})

    def check(self, module: ModuleType) -> None:
        owner, _ = self.locate(module)
        fields: dict[str, Any] | None = getattr(owner, "__dataclass_fields__", None)
        if fields is None or self.field.after not in fields:
            found = _describe(owner) if fields is None else f"a dataclass without {self.field.after!r}"
            raise GraftError(self.target, f"a dataclass with a field {self.field.after!r}", found, _REMEDY)

    def apply(self, module: ModuleType) -> Callable[[], None]:
        owner, _ = self.locate(module)
        before = dict(vars(owner))
        theirs = frozenset(name for name, value in before.items() if _plugin_of(value, owner.__module__) is not None)

        def restore(names: Iterable[str]) -> None:
            for name in names:
                if name in before:
                    setattr(owner, name, before[name])
                else:
                    delattr(owner, name)

        try:
            for name, value in with_field(owner, self.field, theirs).items():
                setattr(owner, name, value)
            for name, value in rebuild(owner, theirs).items():
                setattr(owner, name, value)
        except BaseException:
            restore([name for name, value in vars(owner).items() if before.get(name, _ABSENT) is not value])
            raise
        ours = {name: value for name, value in vars(owner).items() if before.get(name, _ABSENT) is not value}

        def undo() -> None:
            for name, value in ours.items():
                if vars(owner).get(name) is not value:
                    raise GraftError(
                        f"{self.target}.{name}", "what we put there", _describe(vars(owner).get(name)),
                        "somebody changed it after us; undo theirs first",
                    )  # fmt: skip
            restore(ours)

        return undo

    def wrapped_by(self, module: ModuleType) -> str | None:
        owner, _ = self.locate(module)
        return next((name for value in vars(owner).values() if (name := _plugin_of(value, owner.__module__))), None)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one graft, as a fact for whoever reports it."""

    graft: Graft
    state: State
    composed_with: str | None = None


_undo: dict[Graft, Callable[[], None]] = {}


def graft_module(module: ModuleType, grafts: Iterable[Graft]) -> list[Outcome]:
    """Check every graft of a module, then apply all of them.

    Args:
        module: The imported target module.
        grafts: The rows whose target lies in it.

    Returns:
        One outcome a graft, in order. Applying twice is a no-op.

    Raises:
        GraftError: A check failed; nothing was assigned.
    """
    outcomes: list[Outcome] = []
    for graft in grafts:
        if graft in _undo:
            outcomes.append(Outcome(graft=graft, state="already applied"))
        elif not _in_release(graft):
            outcomes.append(Outcome(graft=graft, state="not in this release"))
        elif graft.steps_aside(module):
            outcomes.append(Outcome(graft=graft, state="native"))
        elif graft.present is not None and graft.present(module):
            outcomes.append(Outcome(graft=graft, state="present"))
        else:
            graft.check(module)
            outcomes.append(Outcome(graft=graft, state="applied", composed_with=graft.wrapped_by(module)))
    done: list[Graft] = []
    try:
        for outcome in outcomes:
            if outcome.state == "applied":
                _undo[outcome.graft] = outcome.graft.apply(module)
                done.append(outcome.graft)
    except BaseException:
        undo(done)
        raise
    return outcomes


def undo(grafts: Iterable[Graft]) -> None:
    """Put back what the applied ones of these grafts replaced, the last one first."""
    for graft in reversed(list(grafts)):
        if graft in _undo:
            _undo[graft]()
            del _undo[graft]


def applied(graft: Graft) -> bool:
    return graft in _undo


def installed_release(distribution: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _in_release(graft: Graft) -> bool:
    if not graft.releases:
        return True
    release = installed_release(graft.distribution)
    return release is None or SpecifierSet(graft.releases, prereleases=True).contains(release)


def _function(attribute: Any) -> Any:
    return attribute.__func__ if isinstance(attribute, (staticmethod, classmethod)) else attribute


def _takes(parameters: Mapping[str, inspect.Parameter], expected: tuple[str, ...]) -> bool:
    """Whether a signature begins with these names; a wrapper that takes anything does."""
    for name, parameter in zip(expected, parameters.values(), strict=False):
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            return True
        if parameter.name != name:
            return False
    return len(parameters) >= len(expected)


def _plugin_of(attribute: Any, host: str) -> str | None:
    """Module of the plugin that an attribute's code comes from; None for the host's own and for what decorates it.

    A wrapper made with functools.wraps carries the host's `__module__`, but its code lives in its author's module.
    """
    home = getattr(_function(attribute), "__globals__", {}).get("__name__")
    return None if home in (None, host) or str(home).partition(".")[0] in _NOT_PLUGINS else str(home)


def _like(before: Any, after: Any) -> Any:
    """Give a replacement the descriptor kind of what it replaces."""
    if isinstance(before, staticmethod):
        return staticmethod(after)
    if isinstance(before, classmethod):
        return classmethod(after)
    return after


def _describe(found: Any) -> str:
    function = _function(found)
    home = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", None)
    return f"{home}.{name}" if home and name else f"{type(found).__name__} {found!r}"[:120]
