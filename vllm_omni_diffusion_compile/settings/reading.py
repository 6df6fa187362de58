"""Reading the mapping `diffusion_compile_config`, and saying what is wrong with it."""

from __future__ import annotations

import difflib
import inspect
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from vllm_omni_diffusion_compile.errors import SettingError
from vllm_omni_diffusion_compile.settings.config import DiffusionCompileConfig
from vllm_omni_diffusion_compile.settings.names import CONFIG, NAMES, PREFIX

_EXAMPLE = '{"mode": "max-autotune-no-cudagraphs"}'

KEYS = tuple(DiffusionCompileConfig.model_fields)


def read_config(value: object, named: str = CONFIG) -> DiffusionCompileConfig:
    """Read the mapping `diffusion_compile_config`.

    Args:
        value: A mapping, a `DiffusionCompileConfig`, or None for the defaults.
        named: How the user typed its name, for the message.

    Raises:
        SettingError: It is no mapping, or it has an unknown key, a wrong value, or values that contradict each other.
    """
    if isinstance(value, DiffusionCompileConfig):
        return value
    if value is not None and not isinstance(value, Mapping):
        raise SettingError(f"{named} is {_found(value)}, expected a mapping such as {_EXAMPLE}")
    try:
        return DiffusionCompileConfig.model_validate(_plain(value or {}))
    except ValidationError as error:
        raise SettingError(explain(error, DiffusionCompileConfig, named)) from None


def plain_config(value: object, named: str = CONFIG) -> dict[str, Any] | None:
    """Check the mapping `diffusion_compile_config` and return what it says, in types that JSON knows.

    This is the form in which vLLM-Omni's configuration classes hold it and hand it to other processes; a key that was
    left out stays away, so that another source can still set it.

    Raises:
        SettingError: As `read_config`.
    """
    return None if value is None else read_config(value, named).model_dump(mode="json", exclude_unset=True)


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return two mappings as one; where both have a key, mappings are merged and any other value is that of `over`."""
    both = {
        name: merged(base[name], over[name]) for name in base.keys() & over.keys() if _are_mappings(base, over, name)
    }
    return {**base, **over, **both}


def _are_mappings(base: Mapping[str, Any], over: Mapping[str, Any], name: str) -> bool:
    return isinstance(base[name], Mapping) and isinstance(over[name], Mapping)


def _plain(value: object) -> object:
    """Turn what a YAML reader or OmegaConf hands over into the types that pydantic's strict mode accepts."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_plain(item) for item in value]
    return value


# What pydantic's types of error expect.
_EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_type": "a whole number",
    "list_type": "a list",
    "model_type": "a mapping",
    "string_type": "a text",
    "too_short": "at least one entry",
}
_BOUNDS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


def explain(error: ValidationError, model: type[BaseModel], named: str = "") -> str:
    """Say of each error what was found, what was expected and what to do.

    Args:
        error: What `model` raised.
        model: For the keys that it knows, and those of the mappings among its fields.
        named: How the user typed the name of the whole; nothing for names that stand by themselves.
    """
    lines: list[str] = []
    for detail in error.errors(include_url=False):
        kind, found, context = detail["type"], detail["input"], detail.get("ctx", {})
        path = _path(named, detail["loc"] if kind != "invalid_key" else (*detail["loc"][:-1], str(detail["loc"][-1])))
        if kind in ("extra_forbidden", "invalid_key"):
            lines.append(_unknown(path, str(detail["loc"][-1]), _keys_of(_model_at(model, detail["loc"]))))
        elif kind == "missing":
            lines.append(f"{path} is missing from {_found(found)}")
        elif kind == "value_error":
            lines.append(
                f"{path} is {_shown(found)}, {context['error']}" if detail["loc"] else f"{path}: {context['error']}"
            )
        else:
            if kind == "literal_error":
                expected = context["expected"]
            elif kind in _BOUNDS:
                words, bound = _BOUNDS[kind]
                expected = f"{words} {context[bound]}"
            else:
                expected = _EXPECTED.get(kind, detail["msg"])
            lines.append(f"{path} is {_found(found)}, expected {expected}; leave it out for the default")
    return "; ".join(lines)


def _path(named: str, location: tuple[int | str, ...]) -> str:
    path = named
    for part in location:
        path += f"[{part}]" if isinstance(part, int) and path else f".{part}" if path else str(part)
    return path


def _model_at(model: type[BaseModel], location: tuple[int | str, ...]) -> type[BaseModel]:
    """Return the innermost mapping on the way to a place."""
    for part in location[:-1]:
        field = next((field for name, field in model.model_fields.items() if part in (name, field.alias)), None)
        if field is not None:
            model = next(_models_in(field.annotation), model)
    return model


def _keys_of(model: type[BaseModel]) -> tuple[str, ...]:
    """Return the keys as a user types them: `from` is the field `from_`."""
    return tuple(field.alias or name for name, field in model.model_fields.items())


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _models_in(argument)


def _unknown(path: str, key: str, known: tuple[str, ...]) -> str:
    setting = next((name for name in NAMES if key in (name, name.removeprefix(PREFIX))), None)
    if setting is not None:
        return f"unknown key {path!r}; {setting!r} is a setting of its own, beside {CONFIG!r}"
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    meant = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown key {path!r}; {meant}Known: {', '.join(known)}"


def _found(value: object) -> str:
    """Show a value with its type where the value alone does not say it."""
    shown = _shown(value)
    return shown if value is None or isinstance(value, (bool, int, float)) else f"{shown} ({type(value).__name__})"


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
