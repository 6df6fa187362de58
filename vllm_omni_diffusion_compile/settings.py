"""Every setting of this package: typed, validated and documented once. `docs/options.md` is rendered from it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from vllm_omni_diffusion_compile.errors import SettingError

VAE = "diffusion_compile_vae"
CONFIG = "diffusion_compile_config"
# What vLLM-Omni does not have itself: these become fields of its configuration classes.
OWN = (VAE, CONFIG)
_PREFIX = "diffusion_compile_"

_EXAMPLE = '{"mode": "max-autotune-no-cudagraphs"}'
# Backends to which `mode` means something.
_INDUCTOR = ("auto", "inductor")
_CUDA_GRAPHS = "CUDA graphs, whose outputs live in buffers that the next call overwrites"
_IDENTIFIER = r"[A-Za-z_]\w*"
_DOTTED = rf"{_IDENTIFIER}(\.{_IDENTIFIER})*"
_BACKEND = re.compile(rf"[A-Za-z_][\w-]*|{_DOTTED}:{_DOTTED}|{_DOTTED}\.{_IDENTIFIER}")

# Compilations of one region before torch gives up on it. Torch allows 8, which 8 image sizes use up with static shapes.
_STATIC_RECOMPILE_LIMIT = 64


class DiffusionCompileConfig(BaseModel):
    """How the compiler is used: the keys of the mapping `diffusion_compile_config`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    backend: str = Field(
        default="auto",
        description="The compiler. `auto` is `inductor` where the platform supports it; elsewhere nothing is "
        "compiled. A name that torch.compile knows, or a dotted path (`package.module:callable` or "
        "`package.module.callable`) to a backend of your own; a class is called without arguments to make one. If a "
        "backend that is named is not there, the worker does not start. `cudagraphs` is refused, for the reason given "
        "at `mode`.",
        json_schema_extra={"values": "`auto`, `inductor`, another name that torch.compile knows, or a dotted path"},
    )
    mode: Literal["default", "max-autotune-no-cudagraphs"] = Field(
        default="default",
        description="Inductor's mode. `max-autotune-no-cudagraphs` measures several kernels for each operation: it "
        f"takes longer to compile. `reduce-overhead` and `max-autotune` are refused: they use {_CUDA_GRAPHS}. Refused "
        "too with a backend other than `auto` and `inductor`, which has no such modes.",
    )
    on_failure: Literal["eager", "raise"] = Field(
        default="eager",
        description="What follows when compiling fails: `eager` runs the region without the compiler from then on and "
        "answers the request; `raise` fails it.",
    )
    infer_regions: bool = Field(
        default=True,
        description="Whether repeated blocks are looked for in the structure of a model that declares none.",
    )
    recompile_limit: int | None = Field(
        default=None,
        ge=1,
        description="How often one region may be compiled before torch runs it without the compiler. Unset, it is "
        "torch's own limit, and with `diffusion_compile_dynamic` off, where every shape is compiled by itself, "
        f"{_STATIC_RECOMPILE_LIMIT}.",
        json_schema_extra={"values": "a whole number of at least 1, or unset"},
    )

    @property
    def needs_inductor(self) -> bool:
        """Whether nothing is compiled where the platform has no inductor."""
        return self.backend in _INDUCTOR

    @field_validator("backend")
    @classmethod
    def _well_formed(cls, backend: str) -> str:
        if backend == "cudagraphs":
            raise ValueError(f"which uses {_CUDA_GRAPHS}; use 'inductor'")
        if not _BACKEND.fullmatch(backend):
            raise ValueError(
                "which is neither a name nor a dotted path; expected 'auto', 'inductor', another name that "
                "torch.compile knows, or 'package.module:callable'"
            )
        return backend

    @field_validator("mode", mode="before")
    @classmethod
    def _without_cuda_graphs(cls, mode: object) -> object:
        if mode in ("reduce-overhead", "max-autotune"):
            raise ValueError(f"which uses {_CUDA_GRAPHS}; use 'max-autotune-no-cudagraphs'")
        return mode

    @model_validator(mode="after")
    def _modes_are_inductors(self) -> DiffusionCompileConfig:
        if self.mode != "default" and self.backend not in _INDUCTOR:
            raise ValueError(
                f"mode is {self.mode!r} and backend is {self.backend!r}, but only inductor has modes; leave mode out, "
                "or use the backend 'inductor'"
            )
        return self


class DiffusionCompileSettings(BaseModel):
    """How the diffusion models of one stage are compiled.

    The names are those of the serve flags (with dashes), of the deploy YAML and of the keyword arguments of `Omni` and
    `OmniDiffusionConfig`. The command line wins over the YAML, the YAML over the default.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    diffusion_compile_granularity: Literal["regional", "full"] = Field(
        default="regional",
        description="What is compiled: `regional` compiles the repeated blocks of the transformer, `full` the whole "
        "transformer. `full` cannot be combined with HSDP, sequence parallelism, CPU, layerwise or distributed "
        "layerwise offload.",
        json_schema_extra={"flag": "--diffusion-compile-granularity regional|full", "from": "vLLM-Omni"},
    )
    diffusion_compile_dynamic: bool = Field(
        default=True,
        description="Whether the transformer is compiled for any shape. Off, every new shape is compiled once more: "
        "faster kernels for a fixed set of shapes, a wait at each new one.",
        json_schema_extra={"flag": "--[no-]diffusion-compile-dynamic", "from": "vLLM-Omni"},
    )
    diffusion_compile_vae: bool = Field(
        default=True,
        description="Whether VAE decode is compiled too, and warmed up by requests on the ordinary path before the "
        "server is ready.",
        json_schema_extra={"flag": "--[no-]diffusion-compile-vae", "from": "this package"},
    )
    diffusion_compile_config: DiffusionCompileConfig = Field(
        default_factory=DiffusionCompileConfig,
        description="How the compiler is used: a mapping of the keys below, each of which may be left out.",
        json_schema_extra={
            "flag": "--diffusion-compile-config JSON",
            "from": "this package",
            "example": {"mode": "max-autotune-no-cudagraphs", "on_failure": "raise"},
        },
    )

    @classmethod
    def of(cls, config: object) -> DiffusionCompileSettings:
        """Read the settings from the attributes of any object; one that is missing or None means the default.

        Args:
            config: An `OmniDiffusionConfig`, a stage of a deploy YAML, or whatever else has attributes of these names.

        Raises:
            SettingError: A value that no setting can have, or two that contradict each other.
        """
        given = {name: value for name in cls.model_fields if (value := getattr(config, name, None)) is not None}
        if CONFIG in given:
            given[CONFIG] = read_config(given[CONFIG])
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise SettingError(_explain(error, NAMES)) from None


NAMES = tuple(DiffusionCompileSettings.model_fields)
KEYS = tuple(DiffusionCompileConfig.model_fields)


def effective_recompile_limit(settings: DiffusionCompileSettings) -> int | None:
    """Return how often torch may compile one region; None leaves torch's own limit as it is."""
    limit = settings.diffusion_compile_config.recompile_limit
    if limit is None and not settings.diffusion_compile_dynamic:
        return _STATIC_RECOMPILE_LIMIT
    return limit


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
        raise SettingError(_explain(error, KEYS, named)) from None


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


def refuse_near_misses(names: Iterable[str], known: Iterable[str] = ()) -> None:
    """Refuse a name that was meant to be one of ours; other unknown names are the host's business.

    Args:
        names: Names that the user gave, with underscores.
        known: Names that the host has of its own; never refused.

    Raises:
        SettingError: A name that starts with `diffusion_compile_`, or nearly is one of ours, and that nobody knows.
    """
    for name in set(names) - set(NAMES) - set(known):
        near = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.85)
        if near or name.startswith(_PREFIX):
            meant = near or difflib.get_close_matches(name, NAMES, n=1, cutoff=0.0)
            raise SettingError(f"unknown setting {name!r}; did you mean {meant[0]!r}? Known: {', '.join(NAMES)}")


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
    "float_type": "a number",
    "int_type": "a whole number",
    "list_type": "a list",
    "string_type": "a text",
}


def _explain(error: ValidationError, known: tuple[str, ...], named: str = "") -> str:
    """Say of each error what was found, what was expected and what to do."""
    lines: list[str] = []
    for detail in error.errors(include_url=False):
        path = ".".join([*([named] if named else []), *map(str, detail["loc"])])
        kind, found, context = detail["type"], detail["input"], detail.get("ctx", {})
        if kind in ("extra_forbidden", "invalid_key"):
            lines.append(_unknown(path, str(detail["loc"][-1]), known))
        elif kind == "value_error":
            lines.append(f"{path} is {found!r}, {context['error']}" if detail["loc"] else f"{path}: {context['error']}")
        else:
            expected = (
                context["expected"]
                if kind == "literal_error"
                else f"at least {context['ge']}"
                if kind == "greater_than_equal"
                else _EXPECTED.get(kind, detail["msg"])
            )
            lines.append(f"{path} is {_found(found)}, expected {expected}; leave it out for the default")
    return "; ".join(lines)


def _unknown(path: str, key: str, known: tuple[str, ...]) -> str:
    setting = next((name for name in NAMES if key in (name, name.removeprefix(_PREFIX))), None)
    if setting is not None:
        return f"unknown key {path!r}; {setting!r} is a setting of its own, beside {CONFIG!r}"
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    meant = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown key {path!r}; {meant}Known: {', '.join(known)}"


def _found(value: object) -> str:
    """Show a value with its type where the value alone does not say it."""
    shown = repr(value)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return shown if value is None or isinstance(value, (bool, int, float)) else f"{shown} ({type(value).__name__})"
