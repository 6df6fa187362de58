"""Transformers in their real size, with random weights, and what a request calls them with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

TEXT_ROWS = 60
# Latent frames of a video: 81 frames at a temporal stride of 4.
_LATENT_FRAMES = 21


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """One of them.

    Args:
        pipeline: Its pipeline's name in the host's registry.
        build: Makes it from keyword arguments, those of `tiny` or of the real size.
        inputs: What it is called with, for an image of so many pixels in each direction.
        sizes: Pixels; the first is what cold compilation is measured with.
        options: Of the real size, where they are not the class's defaults.
        tiny: For a dry run.
        layers: Name of the option that says how many blocks it has.
        timed: A part of its attention, whose backend is reported.
    """

    pipeline: str
    build: Callable[..., Any]
    inputs: Callable[[Any, int], dict[str, Any]]
    sizes: tuple[int, int]
    options: Mapping[str, Any] = field(default_factory=dict)
    tiny: Mapping[str, Any]
    layers: str
    timed: Callable[[Any], Any]


def _z_image(**options: Any) -> Any:
    from vllm_omni.diffusion.models.z_image.z_image_transformer import ZImageTransformer2DModel

    return ZImageTransformer2DModel(**options)


def _z_image_inputs(transformer: Any, size: int) -> dict[str, Any]:
    import torch

    side, channels = size // 8, transformer.in_channels
    features = transformer.cap_embedder[0].weight.numel()
    return {
        "x": [torch.randn(channels, 1, side, side, **_like(transformer, size))],
        "t": torch.tensor([0.5], device=_device(transformer), dtype=torch.bfloat16),
        "cap_feats": [torch.randn(TEXT_ROWS, features, **_like(transformer, size))],
    }


def _wan(**options: Any) -> Any:
    from vllm_omni.diffusion.models.wan2_2.wan2_2_transformer import WanTransformer3DModel

    return WanTransformer3DModel(**options)


def _wan_inputs(transformer: Any, size: int) -> dict[str, Any]:
    import torch

    config, side = transformer.config, size // 8
    return {
        "hidden_states": torch.randn(1, config.in_channels, _LATENT_FRAMES, side, side, **_like(transformer, size)),
        "timestep": torch.tensor([500], device=_device(transformer)),
        "encoder_hidden_states": torch.randn(1, 512, config.text_dim, **_like(transformer, size)),
        "return_dict": False,
    }


def _device(transformer: Any) -> Any:
    return next(transformer.parameters()).device


def _like(transformer: Any, seed: int) -> dict[str, Any]:
    """Keyword arguments of `torch.randn`."""
    import torch

    device = _device(transformer)
    return {"generator": torch.Generator(device).manual_seed(seed), "device": device, "dtype": torch.bfloat16}


TRANSFORMERS: Mapping[str, Transformer] = {
    # 6 B parameters; 30 blocks and 4 that refine image and text.
    "z_image": Transformer(
        pipeline="ZImagePipeline", build=_z_image, inputs=_z_image_inputs, sizes=(1024, 512), layers="n_layers",
        tiny={
            "in_channels": 4, "dim": 32, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2,
            "cap_feat_dim": 32, "axes_dims": [4, 6, 6], "axes_lens": [128, 64, 64],
        },
        timed=lambda transformer: transformer.layers[0].attention.attn,
    ),
    # Wan2.1 and 2.2 with 1.3 B parameters: 30 blocks and nothing beside them.
    "wan": Transformer(
        pipeline="WanPipeline", build=_wan, inputs=_wan_inputs, sizes=(512, 384), layers="num_layers",
        options={"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30},
        tiny={
            "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "text_dim": 32,
            "freq_dim": 32, "ffn_dim": 64, "num_layers": 2,
        },
        timed=lambda transformer: transformer.blocks[0].attn1.attn,
    ),
}  # fmt: skip
