"""What a stage's configuration says of packed lengths."""

from __future__ import annotations

from typing import Any

from vllm_omni_diffusion_compile.packed_length.buckets import Buckets
from vllm_omni_diffusion_compile.settings import DiffusionCompileSettings


def buckets_of(od_config: Any) -> Buckets | None:
    """Return the buckets of a stage; None if it has none.

    Raises:
        SettingError: Its settings are wrong.
    """
    setting = DiffusionCompileSettings.of(od_config).diffusion_compile_config.pad_seq_buckets
    return None if setting is None else Buckets.of(setting)


def strict_ranks(od_config: Any) -> int:
    """Return how many ranks have to share a packed sequence evenly.

    Source: `_prepare_sp_input` in diffusion/hooks/sequence_parallel.py, which refuses an uneven one in its strict mode;
    0.28.0 and 0.30.0.
    """
    parallel = getattr(od_config, "parallel_config", None)
    if getattr(parallel, "ulysses_mode", "strict") != "strict":
        return 1
    return int(getattr(parallel, "sequence_parallel_size", 1) or 1)
