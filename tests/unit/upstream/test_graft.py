"""Grafts on a module made up for the purpose."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pydantic
import pytest
from pydantic.dataclasses import dataclass as pydantic_dataclass

from vllm_omni_diffusion_compile.errors import GraftError
from vllm_omni_diffusion_compile.upstream.dataclass_field import NewField
from vllm_omni_diffusion_compile.upstream.graft import FieldGraft, Graft, applied, graft_module, undo


def loud(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return ("ours", original(*args, **kwargs))

    return wrapper


@dataclasses.dataclass
class Plain:
    path: str
    dynamic: bool = True
    names: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Frozen:
    dynamic: bool | None = None


@pydantic_dataclass(config=pydantic.ConfigDict(extra="forbid"))
class Strict:
    dynamic: bool = pydantic.Field(default=True, strict=True)
    size: int = 1


class Runner:
    def load(self, path: str) -> Any:
        return path

    @staticmethod
    def create(kwargs: dict[str, int]) -> Any:
        return kwargs

    @classmethod
    def named(cls, name: str) -> Any:
        return f"{cls.__name__}:{name}"


@pytest.fixture
def module() -> Iterator[ModuleType]:
    """A module named `fakehost` with one class of each kind; whatever a test grafted is undone."""
    fake = ModuleType("fakehost")
    vars(fake).update(Plain=Plain, Frozen=Frozen, Strict=Strict, Runner=Runner, FIELDS=frozenset({"dynamic"}))
    sys.modules["fakehost"] = fake
    made.clear()
    yield fake
    undo(made)
    del sys.modules["fakehost"]


made: list[Graft] = []


def graft(name: str, make: Callable[[Any], Any] = loud, **options: Any) -> Graft:
    made.append(Graft(target=f"fakehost:{name}", make=make, why="w", upstream="u", remove_when="r", **options))
    return made[-1]


def field_graft(name: str, annotation: Any = bool, default: Any = True, after: str = "dynamic") -> Graft:
    new = NewField(name="vae", annotation=annotation, default=default, after=after)
    made.append(FieldGraft(target=f"fakehost:{name}", make=loud, field=new, why="w", upstream="u", remove_when="r"))
    return made[-1]


def test_a_method_is_wrapped_and_put_back(module: ModuleType) -> None:
    before = inspect.getattr_static(Runner, "load")
    row = graft("Runner.load", parameters=("self", "path"))
    assert [outcome.state for outcome in graft_module(module, [row])] == ["applied"]
    assert Runner().load("x") == ("ours", "x")
    assert [outcome.state for outcome in graft_module(module, [row])] == ["already applied"]
    assert Runner().load("x") == ("ours", "x")
    undo([row])
    assert inspect.getattr_static(Runner, "load") is before
    assert not applied(row)


def test_static_and_class_methods_stay_what_they_are(module: ModuleType) -> None:
    graft_module(
        module, [graft("Runner.create", parameters=("kwargs",)), graft("Runner.named", parameters=("cls", "name"))]
    )
    assert Runner.create({"a": 1}) == ("ours", {"a": 1})
    assert Runner().named("x") == ("ours", "Runner:x")


def test_no_graft_of_a_module_is_applied_when_one_cannot_hold(module: ModuleType) -> None:
    good = graft("Runner.load", parameters=("self", "path"))
    bad = graft("Runner.create", parameters=("settings",))
    with pytest.raises(
        GraftError, match=r"fakehost:Runner.create: expected parameters \('settings',\), found parameters \('kwargs',\)"
    ):
        graft_module(module, [good, bad])
    assert Runner().load("x") == "x"
    assert not applied(good)


def test_what_was_applied_is_undone_when_a_later_one_fails_to_apply(module: ModuleType) -> None:
    def explode(_: Any) -> Any:
        raise ZeroDivisionError

    good = graft("Runner.load", parameters=("self",))
    with pytest.raises(ZeroDivisionError):
        graft_module(module, [good, graft("Runner.named", explode, parameters=("cls",))])
    assert Runner().load("x") == "x"
    assert not applied(good)


@pytest.mark.parametrize("name", ["Runner.gone", "Gone.load", "gone"])
def test_a_missing_target_is_named(module: ModuleType, name: str) -> None:
    with pytest.raises(GraftError, match=f"fakehost:{name}"):
        graft_module(module, [graft(name, parameters=("self",))])


def test_an_addition_steps_aside_where_the_name_exists(module: ModuleType) -> None:
    new, old = (
        graft("Runner.extra", lambda _: lambda self: "new", adds=True),
        graft("Runner.load", lambda _: None, adds=True),
    )
    assert [outcome.state for outcome in graft_module(module, [new, old])] == ["applied", "native"]
    assert Runner().extra() == "new"  # type: ignore[attr-defined]
    undo([new])
    assert not hasattr(Runner, "extra")


def test_native_and_release_probes_decide(module: ModuleType) -> None:
    rows = [
        graft("Runner.load", parameters=("self",), native=lambda m: hasattr(m, "FIELDS")),
        graft("FIELDS", lambda value: value | {"vae"}, value=frozenset, present=lambda m: "dynamic" in m.FIELDS),
    ]
    assert [outcome.state for outcome in graft_module(module, rows)] == ["native", "present"]
    assert Runner().load("x") == "x"


def test_a_constant_of_another_type_is_refused(module: ModuleType) -> None:
    with pytest.raises(GraftError, match="expected a dict, found frozenset"):
        graft_module(module, [graft("FIELDS", value=dict)])


def test_another_plugins_wrapper_is_named_and_called(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    namespace: dict[str, Any] = {"__name__": "other_plugin", "functools": functools}
    exec(  # a module of its own, as another plugin would be
        "def wrap(original):\n"
        "    @functools.wraps(original)\n"
        "    def theirs(*args):\n"
        "        return ('theirs', original(*args))\n"
        "    return theirs\n",
        namespace,
    )
    monkeypatch.setattr(Runner, "load", namespace["wrap"](Runner.load))
    row = graft("Runner.load", parameters=("self", "path"))
    (outcome,) = graft_module(module, [row])
    assert outcome.composed_with == "other_plugin"
    assert Runner().load("x") == ("ours", ("theirs", "x"))
    undo([row])
    assert Runner().load("x") == ("theirs", "x")


def test_a_wrapper_put_over_ours_is_not_thrown_away_by_undo(module: ModuleType) -> None:
    row = graft("Runner.load", parameters=("self",))
    graft_module(module, [row])
    ours = Runner.load

    def theirs(self: Runner, path: str) -> Any:
        return ours(self, path)

    Runner.load = theirs  # type: ignore[method-assign]
    with pytest.raises(GraftError, match="undo theirs first"):
        undo([row])
    Runner.load = ours  # type: ignore[method-assign]


@pytest.mark.parametrize("cls", [Plain, Frozen, Strict])
def test_a_field_is_like_its_neighbours_and_leaves_no_trace(module: ModuleType, cls: Any) -> None:
    arguments = {"path": "p"} if cls is Plain else {}
    before = dict(vars(cls))
    row = field_graft(cls.__name__, default=pydantic.Field(default=True, strict=True) if cls is Strict else True)
    graft_module(module, [row])
    on, off = cls(**arguments), cls(**arguments, vae=False)
    assert (on.vae, off.vae) == (True, False)
    assert on != off and "vae=False" in repr(off)
    assert [field.name for field in dataclasses.fields(cls)][-1] == "vae"
    assert dataclasses.replace(on, vae=False) == off
    assert dataclasses.asdict(off)["vae"] is False
    if cls is Frozen:
        assert hash(on) != hash(off)
        with pytest.raises(dataclasses.FrozenInstanceError):
            on.vae = False
    if cls is Strict:
        wrong: dict[str, Any] = {"vae": "yes"}
        unknown: dict[str, Any] = {"other": 1}
        with pytest.raises(pydantic.ValidationError, match="vae"):
            cls(**wrong)
        with pytest.raises(pydantic.ValidationError, match="other"):
            cls(**unknown)
    undo([row])
    assert dict(vars(cls)) == before
    with pytest.raises((TypeError, pydantic.ValidationError)):
        cls(**arguments, vae=False)


@pytest.mark.parametrize("cls", [Plain, Frozen, Strict])
def test_another_plugins_constructor_is_still_called(
    module: ModuleType, cls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace: dict[str, Any] = {"__name__": "other_plugin", "functools": functools, "calls": []}
    exec(
        "def wrap(init):\n"
        "    @functools.wraps(init)\n"
        "    def __init__(self, *args, **kwargs):\n"
        "        calls.append(kwargs)\n"
        "        init(self, *args, **kwargs)\n"
        "    return __init__\n",
        namespace,
    )
    monkeypatch.setattr(cls, "__init__", namespace["wrap"](cls.__init__))
    row = field_graft(cls.__name__, default=pydantic.Field(default=True, strict=True) if cls is Strict else True)
    (outcome,) = graft_module(module, [row])
    assert outcome.composed_with == "other_plugin"
    arguments = {"path": "p"} if cls is Plain else {}
    assert cls(**arguments, vae=False).vae is False
    assert cls(**arguments).vae is True
    assert len(namespace["calls"]) == 2
    undo([row])


def test_undoing_a_field_leaves_what_others_changed_since(module: ModuleType) -> None:
    row = field_graft("Plain")
    graft_module(module, [row])
    Plain.added = "theirs"  # type: ignore[attr-defined]
    try:
        undo([row])
        assert Plain.added == "theirs"  # type: ignore[attr-defined]
        assert "vae" not in Plain.__dataclass_fields__
    finally:
        del Plain.added  # type: ignore[attr-defined]


def test_a_wrapper_that_takes_anything_is_composed_with(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Runner.load

    def anything(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    monkeypatch.setattr(Runner, "load", anything)
    row = graft("Runner.load", parameters=("self", "path"))
    graft_module(module, [row])
    assert Runner().load("x") == ("ours", "x")
    undo([row])


def test_default_factories_survive_the_new_field(module: ModuleType) -> None:
    graft_module(module, [field_graft("Plain")])
    first, second = Plain("a"), Plain("b")
    first.names.append("x")
    assert second.names == []


def test_a_class_without_the_neighbour_is_refused_and_one_with_the_field_is_native(module: ModuleType) -> None:
    with pytest.raises(GraftError, match="a dataclass with a field 'gone'"):
        graft_module(module, [field_graft("Plain", after="gone")])
    with pytest.raises(GraftError, match="a dataclass"):
        graft_module(module, [field_graft("Runner")])
    vars(module)["Native"] = dataclasses.make_dataclass("Native", [("dynamic", bool, True), ("vae", bool, True)])
    assert [outcome.state for outcome in graft_module(module, [field_graft("Native")])] == ["native"]
