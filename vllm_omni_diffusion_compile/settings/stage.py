"""The settings of one stage: what has a flag, a key of the deploy YAML and a keyword argument of its own."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_omni_diffusion_compile.errors import SettingError
from vllm_omni_diffusion_compile.settings.config import (
    RECOMPILATIONS_PER_SHAPE,
    STATIC_RECOMPILE_LIMIT,
    DiffusionCompileConfig,
)
from vllm_omni_diffusion_compile.settings.names import CONFIG, NAMES, PREFIX
from vllm_omni_diffusion_compile.settings.reading import explain, read_config


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
            raise SettingError(explain(error, cls)) from None


def effective_recompile_limit(settings: DiffusionCompileSettings) -> int | None:
    """Return how often torch may compile one region; None leaves torch's own limit as it is."""
    config = settings.diffusion_compile_config
    if not settings.diffusion_compile_dynamic:
        return declared_recompile_limit(settings)
    # Adapters of other layers than each other's have graphs of their own; torch's own limit is enough for one.
    adapters = len(config.warmup.adapters)
    return config.recompile_limit or (RECOMPILATIONS_PER_SHAPE * (1 + adapters) if adapters > 1 else None)


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
        if near or name.startswith(PREFIX):
            meant = near or difflib.get_close_matches(name, NAMES, n=1, cutoff=0.0)
            raise SettingError(f"unknown setting {name!r}; did you mean {meant[0]!r}? Known: {', '.join(NAMES)}")


def declares_shapes(settings: DiffusionCompileSettings) -> bool:
    """Whether the user said which shapes are served."""
    return bool(settings.diffusion_compile_config.warmup.shapes)


def declared_recompile_limit(settings: DiffusionCompileSettings) -> int:
    """Return how often torch may compile what has a graph for each declared shape, or for each bucket."""
    config = settings.diffusion_compile_config
    # A region is compiled for each bucket, and for each number of timesteps in a request: three at most.
    buckets = 0 if config.pad_seq_buckets is None else len(config.pad_seq_buckets.rows)
    shapes = RECOMPILATIONS_PER_SHAPE * len(config.warmup.warmed)
    return config.recompile_limit or max(STATIC_RECOMPILE_LIMIT, shapes, 3 * buckets)
