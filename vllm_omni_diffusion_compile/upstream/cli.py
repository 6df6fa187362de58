"""`vllm serve --omni` flags."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Collection
from typing import Any

from vllm_omni_diffusion_compile.settings import VAE, DiffusionCompileSettings
from vllm_omni_diffusion_compile.upstream.log import host_logger

logger = host_logger(__name__)

_FLAG = "--diffusion-compile-vae"
# Where vLLM keeps what `-O`, `-cc` and their long forms say.
_LANGUAGE_MODEL_FLAGS = {
    "compilation_config": "--compilation-config (-cc, -O.key)",
    "optimization_level": "--optimization-level (-O)",
}


def add_flags(add_cli_args: Callable[..., Any], *, missing: Callable[[], bool]) -> Callable[..., Any]:
    """Add the flag to a parser for `--omni`, if the release lacks it when the parser is built."""

    @functools.wraps(add_cli_args)
    def with_flags(parser: Any, *args: Any, **kwargs: Any) -> Any:
        parser = add_cli_args(parser, *args, **kwargs)
        omni = "--omni" in sys.argv or "--omni" in (getattr(parser, "usage", None) or "")
        if omni and missing() and _FLAG not in parser._option_string_actions:
            group = parser.add_argument_group(
                title="DiffusionCompileConfig", description="Configuration of vllm-omni-diffusion-compile."
            )
            group.add_argument(
                _FLAG,
                action=argparse.BooleanOptionalAction,
                default=None,
                help=f"{DiffusionCompileSettings.model_fields[VAE].description} (default: True)",
            )
        return parser

    return with_flags


def name_flags_without_effect(validate: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(validate)
    def with_warning(self: Any, args: Any) -> None:
        validate(self, args)
        given: Collection[str] = getattr(args, "explicit_keys", frozenset())
        flags = [flag for dest, flag in _LANGUAGE_MODEL_FLAGS.items() if dest in given]
        if flags and getattr(args, "omni", False):
            logger.warning(
                "%s: reaches language-model stages only. Diffusion stages are compiled as "
                "--diffusion-compile-granularity, --diffusion-compile-dynamic and --diffusion-compile-vae say; "
                "--enforce-eager switches all of it off.",
                ", ".join(flags),
            )

    return with_warning
