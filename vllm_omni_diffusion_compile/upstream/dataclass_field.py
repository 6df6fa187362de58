"""One more field on an existing dataclass, computed without touching the class."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any

# What @dataclass writes into a class; whatever of it the class does not have stays away.
_GENERATED = ("__init__", "__repr__", "__eq__", "__hash__", "__match_args__", "__dataclass_fields__", "__replace__")


@dataclass(frozen=True, kw_only=True)
class NewField:
    """A field to be added.

    Args:
        name: Its name.
        annotation: Its type, as the class would have annotated it.
        default: Its default; for a pydantic dataclass also a `pydantic.Field(...)`.
        after: An existing field it belongs beside; that it exists says that this is the class we know.
    """

    name: str
    annotation: Any
    default: Any
    after: str


def with_field(cls: type, new: NewField) -> dict[str, Any]:
    """Return the attributes that `cls` would have with one more field at the end.

    The dataclass machinery itself generates them, on a throw-away class with the same fields: equality, repr, `replace`
    and the constructor are thus exactly what the author of `cls` would have got.
    """
    params = cls.__dataclass_params__  # type: ignore[attr-defined]
    fields: dict[str, dataclasses.Field[Any]] = {
        name: copy.copy(field)
        for name, field in cls.__dataclass_fields__.items()  # type: ignore[attr-defined]
    }
    fields[new.name] = dataclasses.field(default=new.default, kw_only=fields[new.after].kw_only)
    annotations = {name: field.type for name, field in fields.items() if name != new.name} | {new.name: new.annotation}
    namespace: dict[str, Any] = dict(fields)
    namespace |= {"__annotations__": annotations, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    if "__post_init__" in vars(cls):
        namespace["__post_init__"] = cls.__post_init__  # type: ignore[attr-defined]
    twin: type = dataclasses.dataclass(
        type(cls.__name__, cls.__bases__, namespace),
        init=params.init, repr=params.repr, eq=params.eq,
        order=params.order, unsafe_hash=params.unsafe_hash, frozen=params.frozen,
    )  # fmt: skip
    changed = {name: vars(twin)[name] for name in _GENERATED if name in vars(twin) and name in vars(cls)}
    changed["__annotations__"] = vars(cls).get("__annotations__", {}) | {new.name: new.annotation}
    changed[new.name] = new.default
    return changed


def rebuild(cls: type) -> None:
    """Have pydantic look at the fields of a pydantic dataclass again; nothing for a plain one."""
    if "__pydantic_validator__" in vars(cls):
        from pydantic.dataclasses import rebuild_dataclass

        rebuild_dataclass(cls, force=True, raise_errors=True, _parent_namespace_depth=0)
