"""Families whose size is written in their code: built without memory, counted, and not run. And one for diffusers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tools.model_families.family import Draw, Family

_META = "its size cannot be configured: counted, not run"


def _no_inputs(size: int, dtype: torch.dtype) -> Mapping[str, Any]:  # noqa: ARG001 - never called
    return {}


def _sdxl(od_config: Any) -> Any:
    from vllm_omni.diffusion.models.sdxl.sdxl_unet import SDXLUNet2DConditionModel

    return SDXLUNet2DConditionModel(od_config=od_config)


def _magi2(od_config: Any) -> Any:  # noqa: ARG001 - the pipeline hands it none
    from vllm_omni.diffusion.models.magi2.modeling_magi2 import Magi2PreviewTransformer

    return Magi2PreviewTransformer()


def _diffusers_flux(od_config: Any) -> Any:  # noqa: ARG001 - not a class of the host's
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=24, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip


def _diffusers_inputs(size: int, dtype: torch.dtype) -> Mapping[str, Any]:
    draw = Draw(size, dtype)
    rows = {1: 16, 2: 24, 3: 48}[size]
    return {
        "hidden_states": draw.normal(1, rows, 16),
        "encoder_hidden_states": draw.normal(1, 7, 32),
        "pooled_projections": draw.normal(1, 24),
        "timestep": torch.tensor([0.5], dtype=dtype),
        "img_ids": torch.arange(rows)[:, None].expand(rows, 3).float(),
        "txt_ids": torch.zeros(7, 3),
        "return_dict": False,
    }


FAMILIES = (
    Family(name="sdxl", pipeline="StableDiffusionXLPipeline", path="unet", build=_sdxl, inputs=_no_inputs, meta=True,
           limits=_META),
    Family(name="magi2", pipeline="Magi2Pipeline", build=_magi2, inputs=_no_inputs, meta=True,
           limits=f"its own setup_compile(); {_META}"),
    Family(name="diffusers_adapter", pipeline="DiffusersAdapterPipeline", path="_pipeline.transformer",
           plain_parents=True, build=_diffusers_flux, inputs=_diffusers_inputs,
           limits="with the Flux transformer of diffusers; the pipeline of diffusers that holds it is no module"),
)  # fmt: skip
