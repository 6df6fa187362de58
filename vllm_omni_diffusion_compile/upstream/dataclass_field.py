"""One more field on an existing dataclass: what the class would look like, and pydantic's second look at it."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
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


def with_field(cls: type, new: NewField, theirs: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return the attributes that `cls` would have with one more field at the end.

    The dataclass machinery itself generates them, on a throw-away class with the same fields: equality, repr, `replace`
    and the constructor are what the author of `cls` would have got.

    Args:
        cls: The class; it is not changed.
        new: The field.
        theirs: Attributes that another plugin has put there. A constructor of theirs is called and hands nothing of the
            new field on; anything else of theirs stays as it is, and does not know the field.
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
    changed = {
        name: vars(twin)[name] for name in _GENERATED if name in vars(twin) and name in vars(cls) and name not in theirs
    }
    if "__init__" in theirs and not _is_pydantic(cls):
        changed["__init__"] = _around(vars(cls)["__init__"], new)
    changed["__annotations__"] = vars(cls).get("__annotations__", {}) | {new.name: new.annotation}
    changed[new.name] = new.default
    return changed


def _around(init: Callable[..., None], new: NewField) -> Callable[..., None]:
    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        # Set before, for a __post_init__ that looks at it, and past a frozen class's __setattr__.
        object.__setattr__(self, new.name, kwargs.pop(new.name, new.default))
        init(self, *args, **kwargs)

    return __init__


def rebuild(cls: type, theirs: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Have pydantic look at the fields of a pydantic dataclass again; nothing for a plain one.

    Returns:
        What pydantic has overwritten and has to be put back: a constructor of theirs calls pydantic's, which reads the
        new schema from the class.
    """
    if not _is_pydantic(cls):
        return {}
    from pydantic.dataclasses import rebuild_dataclass

    kept = {name: vars(cls)[name] for name in theirs}
    rebuild_dataclass(cls, force=True, raise_errors=True, _parent_namespace_depth=0)
    return kept


def _is_pydantic(cls: type) -> bool:
    return "__pydantic_validator__" in vars(cls)
