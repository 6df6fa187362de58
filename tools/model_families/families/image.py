"""Families that take image latents as [batch, channels, height, width], or as a list of images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tools.model_families.family import Draw, Family

_TEXT = 7
_SIDES = {1: (8, 8), 2: (8, 12), 3: (12, 16)}
_AXES = (4, 6, 6)
_LENGTHS = (64, 64, 64)
_LUMINA = {
    "patch_size": 2, "in_channels": 4, "hidden_size": 32, "num_layers": 2, "num_refiner_layers": 2,
    "num_attention_heads": 2, "num_kv_heads": 1, "multiple_of": 16, "axes_dim_rope": _AXES, "axes_lens": _LENGTHS,
}  # fmt: skip


def _z_image(od_config: Any) -> Any:  # noqa: ARG001 - the pipeline hands it none
    from vllm_omni.diffusion.models.z_image.z_image_transformer import ZImageTransformer2DModel

    return ZImageTransformer2DModel(**_Z_IMAGE)


_Z_IMAGE = {
    "in_channels": 4, "dim": 32, "n_layers": 2, "n_refiner_layers": 2, "n_heads": 2, "n_kv_heads": 2,
    "cap_feat_dim": 32, "axes_dims": [4, 6, 6], "axes_lens": [128, 64, 64],
}  # fmt: skip


def _z_image_inputs(size: int, dtype: torch.dtype) -> Mapping[str, Any]:
    draw = Draw(size, dtype)
    return {
        "x": [draw.normal(4, 1, *_SIDES[size])],
        "t": torch.tensor([0.5], dtype=dtype),
        "cap_feats": [draw.normal(_TEXT, 32)],
    }


def _ming_image(od_config: Any) -> Any:  # noqa: ARG001 - the pipeline hands it none
    from vllm_omni.diffusion.models.ming_image.transformer import MingImageTransformer2DModel

    return MingImageTransformer2DModel(**_Z_IMAGE)


def _ming_flash(od_config: Any) -> Any:  # noqa: ARG001 - the pipeline hands it none
    from vllm_omni.diffusion.models.ming_flash_omni.ming_zimage_transformer import MingZImageTransformer2DModel

    return MingZImageTransformer2DModel(**_Z_IMAGE)


def _sd3(od_config: Any) -> Any:
    from vllm_omni.diffusion.models.sd3.sd3_transformer import SD3Transformer2DModel

    return SD3Transformer2DModel(od_config=od_config)


def _sd3_inputs(size: int, dtype: torch.dtype) -> Mapping[str, Any]:
    draw = Draw(size, dtype)
    return {
        "hidden_states": draw.normal(1, 4, *_SIDES[size]),
        "encoder_hidden_states": draw.normal(1, _TEXT, 32),
        "pooled_projections": draw.normal(1, 24),
        "timestep": torch.tensor([500.0], dtype=dtype),
    }


def _glm_image(od_config: Any) -> Any:
    from vllm_omni.diffusion.models.glm_image.glm_image_transformer import GlmImageTransformer2DModel

    return GlmImageTransformer2DModel(od_config=od_config)


def _glm_inputs(size: int, dtype: torch.dtype) -> Mapping[str, Any]:
    draw = Draw(size, dtype)
    height, width = _SIDES[size]
    return {
        "hidden_states": draw.normal(1, 4, height, width),
        "encoder_hidden_states": draw.normal(1, _TEXT, 32),
        "prior_token_id": draw.tokens(1, height * width // 4, below=64),
        "prior_token_drop": torch.zeros(1, height * width // 4, dtype=torch.bool),
        "timestep": torch.tensor([500]),
        "target_size": torch.tensor([[height * 8, width * 8]], dtype=dtype),
        "crop_coords": torch.zeros(1, 2, dtype=dtype),
        "return_dict": False,
    }


def _boogu_image(od_config: Any) -> Any:
    from vllm_omni.diffusion.models.boogu_image.boogu_image_transformer import BooguImageTransformer2DModel

    return BooguImageTransformer2DModel(od_config)


def _boogu_inputs(size: int, dtype: torch.dtype) -> Mapping[str, Any]:
    from vllm_omni.diffusion.models.boogu_image.boogu_image_transformer import BooguImageDoubleStreamRotaryPosEmbed

    draw = Draw(size, dtype)
    return {
        "hidden_states": draw.normal(1, 4, *_SIDES[size]),
        "timestep": torch.tensor([0.5], dtype=dtype),
        "instruction_hidden_states": draw.normal(1, _TEXT, 32),
        "freqs_real": BooguImageDoubleStreamRotaryPosEmbed.get_freqs_real(_AXES, _LENGTHS, theta=10000),
        "instruction_attention_mask": torch.ones(1, _TEXT, dtype=torch.long),
    }


def _omnigen2(od_config: Any) -> Any:  # noqa: ARG001 - the pipeline hands it none
    from vllm_omni.diffusion.models.omnigen2.omnigen2_transformer import OmniGen2Transformer2DModel

    return OmniGen2Transformer2DModel(**_LUMINA, text_feat_dim=32)


def _omnigen2_inputs(size: int, dtype: torch.dtype) -> Mapping[str, Any]:
    from vllm_omni.diffusion.models.omnigen2.omnigen2_transformer import OmniGen2RotaryPosEmbed

    draw = Draw(size, dtype)
    return {
        "hidden_states": draw.normal(1, 4, *_SIDES[size]),
        "timestep": torch.tensor([0.5], dtype=dtype),
        "text_hidden_states": draw.normal(1, _TEXT, 32),
        "freqs_cis": OmniGen2RotaryPosEmbed.get_freqs_cis(_AXES, _LENGTHS, theta=10000),
        "text_attention_mask": torch.ones(1, _TEXT, dtype=torch.long),
    }


def _mammoth_moda2(od_config: Any) -> Any:  # noqa: ARG001 - the pipeline hands it none
    from vllm_omni.diffusion.models.mammoth_moda2.mammothmoda2_dit_model import Transformer2DModel

    return Transformer2DModel(**_LUMINA, text_feat_dim=32)


def _mammoth_inputs(size: int, dtype: torch.dtype) -> Mapping[str, Any]:
    from vllm_omni.diffusion.models.mammoth_moda2.mammothmoda2_dit_model import RotaryPosEmbedReal

    draw = Draw(size, dtype)
    return {
        "hidden_states": draw.normal(1, 4, *_SIDES[size]),
        "timestep": torch.tensor([0.5], dtype=dtype),
        "text_hidden_states": draw.normal(1, _TEXT, 32),
        "freqs_cis": RotaryPosEmbedReal.get_freqs_real(_AXES, _LENGTHS, theta=10000),
        "text_attention_mask": torch.ones(1, _TEXT, dtype=torch.bool),
    }


def _ernie_image(od_config: Any) -> Any:
    from vllm_omni.diffusion.models.ernie_image.ernie_image_transformer import ErnieImageTransformer2DModel

    return ErnieImageTransformer2DModel(
        in_channels=4, num_layers=2, num_attention_heads=2, ffn_hidden_size=64, hidden_size=32, text_in_dim=32,
        rope_axes_dim=_AXES, od_config=od_config,
    )  # fmt: skip


def _ernie_inputs(size: int, dtype: torch.dtype) -> Mapping[str, Any]:
    draw = Draw(size, dtype)
    return {
        "hidden_states": draw.normal(1, 4, *_SIDES[size]),
        "timestep": torch.tensor([500.0], dtype=dtype),
        "text_bth": draw.normal(1, _TEXT, 32),
        "text_lens": torch.tensor([_TEXT]),
        "return_dict": False,
    }


def _hidream_image(od_config: Any) -> Any:
    from vllm_omni.diffusion.models.hidream_image.hidream_image_transformer import HiDreamImageTransformer2DModel

    return HiDreamImageTransformer2DModel(
        od_config=od_config, patch_size=2, in_channels=4, num_layers=2, num_single_layers=2, attention_head_dim=16,
        num_attention_heads=2, caption_channels=[32, 32], text_emb_dim=24, num_routed_experts=2,
        num_activated_experts=1, axes_dims_rope=(4, 6, 6), max_resolution=(32, 32), llama_layers=[0, 1, 2, 3],
        force_inference_output=True,
    )  # fmt: skip


def _hidream_inputs(size: int, dtype: torch.dtype) -> Mapping[str, Any]:
    draw = Draw(size, dtype)
    return {
        "hidden_states": draw.normal(1, 4, *_SIDES[size]),
        "timesteps": torch.tensor([500.0], dtype=dtype),
        "encoder_hidden_states_t5": draw.normal(1, _TEXT, 32),
        "encoder_hidden_states_llama3": draw.normal(4, 1, _TEXT, 32),
        "pooled_embeds": draw.normal(1, 24),
        "return_dict": False,
    }


FAMILIES = (
    Family(name="z_image", pipeline="ZImagePipeline", build=_z_image, inputs=_z_image_inputs),
    Family(name="ming_image", pipeline="MingImageDiffusionPipeline", build=_ming_image, inputs=_z_image_inputs,
           limits="its own setup_compile()"),
    Family(name="ming_flash_omni", pipeline="MingImagePipeline", build=_ming_flash, inputs=_z_image_inputs),
    Family(
        name="sd3",
        pipeline="StableDiffusion3Pipeline",
        config={
            "num_layers": 2, "sample_size": 16, "in_channels": 4, "out_channels": 4, "num_attention_heads": 2,
            "attention_head_dim": 16, "caption_projection_dim": 32, "pooled_projection_dim": 24,
            "joint_attention_dim": 32, "patch_size": 2, "pos_embed_max_size": 16, "qk_norm": "rms_norm",
            "dual_attention_layers": (),
        },
        build=_sd3,
        inputs=_sd3_inputs,
    ),
    Family(
        name="glm_image",
        pipeline="GlmImagePipeline",
        config={
            "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16,
            "time_embed_dim": 32, "condition_dim": 16, "prior_vq_quantizer_codebook_size": 64, "text_embed_dim": 32,
            "num_layers": 2,
        },
        build=_glm_image,
        inputs=_glm_inputs,
    ),
    Family(
        name="boogu_image",
        pipeline="BooguImagePipeline",
        config={
            **_LUMINA, "num_layers": 4, "num_double_stream_layers": 2,
            "instruction_feature_configs": {
                "instruction_feat_dim": 32, "reduce_type": "mean", "num_instruction_feature_layers": 1,
            },
        },
        build=_boogu_image,
        inputs=_boogu_inputs,
    ),
    Family(name="omnigen2", pipeline="OmniGen2Pipeline", build=_omnigen2, inputs=_omnigen2_inputs),
    Family(name="mammoth_moda2", pipeline="MammothModa2DiTPipeline", path="gen_transformer", build=_mammoth_moda2,
           inputs=_mammoth_inputs),
    Family(name="ernie_image", pipeline="ErnieImagePipeline", build=_ernie_image, inputs=_ernie_inputs),
    Family(name="hidream_image", pipeline="HiDreamImagePipeline", build=_hidream_image, inputs=_hidream_inputs,
           dtypes=(torch.bfloat16,), limits="casts its latents to bf16 itself"),
)  # fmt: skip
