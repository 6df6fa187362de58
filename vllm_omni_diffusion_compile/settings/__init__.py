"""Every setting of this package: typed, validated and documented once. `docs/options.md` is rendered from it."""

from vllm_omni_diffusion_compile.settings.config import DiffusionCompileConfig
from vllm_omni_diffusion_compile.settings.lora import Lora
from vllm_omni_diffusion_compile.settings.names import CONFIG, NAMES, OWN, VAE
from vllm_omni_diffusion_compile.settings.pad_seq_buckets import MAX_ROWS, ROW_ALIGN, PadSeqBuckets, aligned
from vllm_omni_diffusion_compile.settings.reading import KEYS, merged, plain_config, read_config
from vllm_omni_diffusion_compile.settings.stage import (
    DiffusionCompileSettings,
    declared_recompile_limit,
    declares_shapes,
    effective_recompile_limit,
    refuse_near_misses,
)
from vllm_omni_diffusion_compile.settings.warmup import Shape, WarmupConfig

__all__ = [
    "CONFIG",
    "KEYS",
    "MAX_ROWS",
    "NAMES",
    "OWN",
    "ROW_ALIGN",
    "VAE",
    "DiffusionCompileConfig",
    "DiffusionCompileSettings",
    "Lora",
    "PadSeqBuckets",
    "Shape",
    "WarmupConfig",
    "aligned",
    "declared_recompile_limit",
    "declares_shapes",
    "effective_recompile_limit",
    "merged",
    "plain_config",
    "read_config",
    "refuse_near_misses",
]
