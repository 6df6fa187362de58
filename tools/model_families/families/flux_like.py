"""Families whose blocks carry packed image rows beside text rows, with position ids: Flux and its relatives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tools.model_families.family import Draw, Family

_TEXT = 7
_SMALL = {"num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2}
_SIDES = {1: (4, 4), 2: (4, 6), 3: (6, 8)}


def _grid(size: int, axes: int, first_of_row: int) -> torch.Tensor:
    """Position ids of the image rows: [rows, axes], the last but counted dimensions being height and width."""
    height, width = _SIDES[size]
    ids = torch.zeros(height, width, axes)
    ids[..., first_of_row] = torch.arange(height)[:, None]
    ids[..., first_of_row + 1] = torch.arange(width)[None, :]
    return ids.reshape(height * width, axes)


def _rows(size: int) -> int:
    height, width = _SIDES[size]
    return height * width


def _flux(od_config: Any) -> Any:
    from vllm_omni.diffusion.models.flux.flux_transformer import FluxTransformer2DModel

    return FluxTransformer2DModel(
        od_config=od_config, in_channels=16, joint_attention_dim=32, pooled_projection_dim=24,
        axes_dims_rope=(4, 6, 6), **_SMALL,
    )  # fmt: skip


def _flux_inputs(size: int, dtype: torch.dtype) -> Mapping[str, Any]:
    draw = Draw(size, dtype)
    return {
        "hidden_states": draw.normal(1, _rows(size), 16),
        "encoder_hidden_states": draw.normal(1, _TEXT, 32),
        "pooled_projections": draw.normal(1, 24),
        "timestep": torch.tensor([0.5], dtype=dtype),
        "img_ids": _grid(size, 3, 1),
        "txt_ids": torch.zeros(_TEXT, 3),
        "guidance": torch.tensor([4.0]),
        "return_dict": False,
    }


def _flux2(od_config: Any) -> Any:
    from vllm_omni.diffusion.models.flux2.flux2_transformer import Flux2Transformer2DModel

    return Flux2Transformer2DModel(
        od_config=od_config, in_channels=16, joint_attention_dim=32, timestep_guidance_channels=32,
        axes_dims_rope=(4, 4, 4, 4), **_SMALL,
    )  # fmt: skip


def _flux2_klein(od_config: Any) -> Any:
    from vllm_omni.diffusion.models.flux2_klein.flux2_klein_transformer import Flux2Transformer2DModel

    return Flux2Transformer2DModel(
        od_config=od_config, in_channels=16, joint_attention_dim=32, timestep_guidance_channels=32,
        axes_dims_rope=(4, 4, 4, 4), guidance_embeds=False, **_SMALL,
    )  # fmt: skip


def _flux2_inputs(guided: bool) -> Any:
    def inputs(size: int, dtype: torch.dtype) -> Mapping[str, Any]:
        draw = Draw(size, dtype)
        text = torch.zeros(1, _TEXT, 4)
        text[..., 3] = torch.arange(_TEXT)
        return {
            "hidden_states": draw.normal(1, _rows(size), 16),
            "encoder_hidden_states": draw.normal(1, _TEXT, 32),
            "timestep": torch.tensor([0.5], dtype=dtype),
            "img_ids": _grid(size, 4, 1)[None],
            "txt_ids": text,
            "guidance": torch.tensor([4.0]) if guided else None,
            "return_dict": False,
        }

    return inputs


def _longcat_image(od_config: Any) -> Any:
    from vllm_omni.diffusion.models.longcat_image.longcat_image_transformer import LongCatImageTransformer2DModel

    return LongCatImageTransformer2DModel(od_config=od_config)


def _longcat_inputs(size: int, dtype: torch.dtype) -> Mapping[str, Any]:
    draw = Draw(size, dtype)
    return {
        "hidden_states": draw.normal(1, _rows(size), 16),
        "encoder_hidden_states": draw.normal(1, _TEXT, 32),
        "timestep": torch.tensor([0.5], dtype=dtype),
        "img_ids": _grid(size, 3, 1),
        "txt_ids": torch.zeros(_TEXT, 3),
        "return_dict": False,
    }


def _ovis_image(od_config: Any) -> Any:
    from vllm_omni.diffusion.models.ovis_image.ovis_image_transformer import OvisImageTransformer2DModel

    return OvisImageTransformer2DModel(
        od_config=od_config, in_channels=16, out_channels=16, joint_attention_dim=32, axes_dims_rope=(4, 6, 6), **_SMALL
    )


def _qwen_image(od_config: Any) -> Any:
    from vllm_omni.diffusion.models.qwen_image.qwen_image_transformer import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(
        od_config=od_config, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip


def _qwen_inputs(size: int, dtype: torch.dtype) -> Mapping[str, Any]:
    draw = Draw(size, dtype)
    return {
        "hidden_states": draw.normal(1, _rows(size), 16),
        "encoder_hidden_states": draw.normal(1, _TEXT, 32),
        "encoder_hidden_states_mask": torch.ones(1, _TEXT, dtype=torch.bool),
        "timestep": torch.tensor([0.5], dtype=dtype),
        "img_shapes": [[(1, *_SIDES[size])]],
        "txt_seq_lens": [_TEXT],
        "return_dict": False,
    }


def _krea2(od_config: Any) -> Any:
    from vllm_omni.diffusion.models.krea2.krea2_transformer import Krea2Transformer2DModel

    return Krea2Transformer2DModel(
        od_config=od_config, in_channels=16, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=64, timestep_embed_dim=32, text_hidden_dim=32, num_text_layers=2,
        text_num_attention_heads=2, text_num_key_value_heads=2, text_intermediate_size=64, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip


def _krea2_inputs(size: int, dtype: torch.dtype) -> Mapping[str, Any]:
    draw = Draw(size, dtype)
    return {
        "hidden_states": draw.normal(1, _rows(size), 16),
        "encoder_hidden_states": draw.normal(1, _TEXT, 2, 32),
        "timestep": torch.tensor([0.5], dtype=dtype),
        "position_ids": torch.cat([torch.zeros(_TEXT, 3), _grid(size, 3, 1)]),
    }


def _auk(od_config: Any) -> Any:  # noqa: ARG001 - its constructor takes none
    from vllm_omni.diffusion.models.auk.auk_transformer import AuKTransformer

    return AuKTransformer(
        dim=32, heads=2, dim_head=16, ff_mult=2, latent_dim=16, text_hidden_dim=32, num_layers=2, num_single_layers=2
    )


def _auk_inputs(size: int, dtype: torch.dtype) -> Mapping[str, Any]:
    draw = Draw(size, dtype)
    return {
        "x": draw.normal(1, _rows(size), 16),
        "text": draw.normal(1, _TEXT, 32),
        "time": torch.tensor([0.5], dtype=dtype),
    }


FAMILIES = (
    Family(name="flux", pipeline="FluxPipeline", config={"num_layers": 2}, build=_flux, inputs=_flux_inputs),
    Family(name="flux2", pipeline="Flux2Pipeline", build=_flux2, inputs=_flux2_inputs(True)),
    Family(name="flux2_klein", pipeline="Flux2KleinPipeline", build=_flux2_klein, inputs=_flux2_inputs(False)),
    Family(
        name="longcat_image",
        pipeline="LongCatImagePipeline",
        config={
            **_SMALL, "patch_size": 1, "in_channels": 16, "joint_attention_dim": 32, "pooled_projection_dim": 32,
            "axes_dims_rope": [4, 6, 6],
        },
        build=_longcat_image,
        inputs=_longcat_inputs,
    ),
    Family(name="ovis_image", pipeline="OvisImagePipeline", config={"num_layers": 2}, build=_ovis_image,
           inputs=_longcat_inputs),
    Family(name="qwen_image", pipeline="QwenImagePipeline", config={"num_layers": 2}, build=_qwen_image,
           inputs=_qwen_inputs),
    Family(name="krea2", pipeline="Krea2Pipeline", build=_krea2, inputs=_krea2_inputs),
    Family(name="auk", pipeline="AuKPipeline", path="dit", build=_auk, inputs=_auk_inputs),
)  # fmt: skip
