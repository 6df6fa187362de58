"""Families that take video latents as [batch, channels, frames, height, width]."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from tools.model_families.family import Draw, Family

_TEXT = 7
_SHAPES = {1: (2, 4, 4), 2: (2, 4, 6), 3: (3, 6, 8)}
_WAN = {
    "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "text_dim": 32,
    "freq_dim": 32, "ffn_dim": 64, "num_layers": 2,
}  # fmt: skip


def _wan2_2(od_config: Any) -> Any:  # noqa: ARG001 - the pipeline hands it none
    from vllm_omni.diffusion.models.wan2_2.wan2_2_transformer import WanTransformer3DModel

    return WanTransformer3DModel(**_WAN)


def _wan_inputs(size: int, dtype: torch.dtype) -> Mapping[str, Any]:
    draw = Draw(size, dtype)
    return {
        "hidden_states": draw.normal(1, 4, *_SHAPES[size]),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": draw.normal(1, _TEXT, 32),
        "return_dict": False,
    }


def _helios(od_config: Any) -> Any:  # noqa: ARG001 - the pipeline hands it none
    from vllm_omni.diffusion.models.helios.helios_transformer import HeliosTransformer3DModel

    return HeliosTransformer3DModel(**_WAN, rope_dim=(4, 6, 6))


def _hunyuan_video(od_config: Any) -> Any:
    from vllm_omni.diffusion.models.hunyuan_video.hunyuan_video_15_transformer import HunyuanVideo15Transformer3DModel

    return HunyuanVideo15Transformer3DModel(
        od_config=od_config, in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=2,
        num_refiner_layers=2, text_embed_dim=32, text_embed_2_dim=32, image_embed_dim=32, rope_axes_dim=(4, 6, 6),
    )  # fmt: skip


def _hunyuan_inputs(size: int, dtype: torch.dtype) -> Mapping[str, Any]:
    draw = Draw(size, dtype)
    ones = torch.ones(1, _TEXT, dtype=torch.long)
    return {
        "hidden_states": draw.normal(1, 4, *_SHAPES[size]),
        "timestep": torch.tensor([500.0], dtype=dtype),
        "encoder_hidden_states": draw.normal(1, _TEXT, 32),
        "encoder_attention_mask": ones,
        "encoder_hidden_states_2": draw.normal(1, 5, 32),
        "encoder_attention_mask_2": ones[:, :5],
        "image_embeds": draw.normal(1, 3, 32),
        "return_dict": False,
    }


def _ltx2(od_config: Any) -> Any:  # noqa: ARG001 - the pipeline hands it none
    from vllm_omni.diffusion.models.ltx2.ltx2_transformer import LTX2VideoTransformer3DModel

    return LTX2VideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=24, cross_attention_dim=48,
        audio_in_channels=8, audio_out_channels=8, audio_num_attention_heads=2, audio_attention_head_dim=12,
        audio_cross_attention_dim=24, num_layers=2, caption_channels=32,
    )  # fmt: skip


def _ltx2_inputs(size: int, dtype: torch.dtype) -> Mapping[str, Any]:
    draw = Draw(size, dtype)
    frames, height, width = _SHAPES[size]
    return {
        "hidden_states": draw.normal(1, frames * height * width, 8),
        "audio_hidden_states": draw.normal(1, 4 + size, 8),
        "encoder_hidden_states": draw.normal(1, _TEXT, 32),
        "audio_encoder_hidden_states": draw.normal(1, _TEXT, 32),
        "timestep": torch.tensor([500.0]),
        "num_frames": frames,
        "height": height,
        "width": width,
        "audio_num_frames": 4 + size,
        "return_dict": False,
    }


def _lingbot_video(od_config: Any) -> Any:  # noqa: ARG001 - the pipeline hands it none
    from vllm_omni.diffusion.models.lingbot_video.lingbot_video_transformer import LingBotVideoTransformer3DModel

    transformer = LingBotVideoTransformer3DModel(
        in_channels=4, out_channels=4, hidden_size=32, num_attention_heads=2, depth=2, intermediate_size=64,
        text_dim=32, freq_dim=32, axes_dims=(4, 6, 6), axes_lens=(64, 64, 64),
    )  # fmt: skip
    return transformer.to(torch.get_default_dtype())  # its own `to` keeps what has to stay in fp32 there


def _lingbot_video_inputs(size: int, dtype: torch.dtype) -> Mapping[str, Any]:
    return {**_wan_inputs(size, dtype), "timestep": torch.tensor([500.0])}


def _longcat_video(od_config: Any) -> Any:  # noqa: ARG001 - the pipeline hands it none
    from vllm_omni.diffusion.models.longcat_video.longcat_video_avatar_transformer import (
        LongCatVideoAvatarTransformer3DModel,
    )

    return LongCatVideoAvatarTransformer3DModel(
        in_channels=4, out_channels=4, hidden_size=64, depth=2, num_heads=2, caption_channels=32,
        adaln_tembed_dim=32, frequency_embedding_size=32, audio_block=2, audio_channel=8, intermediate_dim=16,
        output_dim=16, context_tokens=4,
    )  # fmt: skip


def _longcat_inputs(size: int, dtype: torch.dtype) -> Mapping[str, Any]:
    draw = Draw(size, dtype)
    frames = _SHAPES[size][0]
    return {
        "hidden_states": draw.normal(1, 4, *_SHAPES[size]),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": draw.normal(1, 1, _TEXT, 32),
        "audio_embs": draw.normal(1, 1 + 4 * (frames - 1), 5, 2, 8),
    }


def _sana_video(od_config: Any) -> Any:  # noqa: ARG001 - the pipeline hands it none
    from vllm_omni.diffusion.models.sana_video.transformer_sana_video import SanaVideoTransformer3DModel

    return SanaVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=2,
        num_cross_attention_heads=2, cross_attention_head_dim=16, cross_attention_dim=32, caption_channels=32,
    )  # fmt: skip


def _anima(od_config: Any) -> Any:  # noqa: ARG001 - the pipeline hands it none
    from vllm_omni.diffusion.models.anima.anima_transformer import AnimaTransformer3DModel

    return AnimaTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=2, text_embed_dim=32,
        adaln_lora_dim=16, max_size=(16, 32, 32), encoder_hidden_states_channels=32,
    )  # fmt: skip


def _anima_inputs(size: int, dtype: torch.dtype) -> Mapping[str, Any]:
    draw = Draw(size, dtype)
    _, height, width = _SHAPES[size]
    return {
        "hidden_states": draw.normal(1, 4, 1, height, width),
        "timestep": torch.tensor([0.5], dtype=dtype),
        "encoder_hidden_states": draw.normal(1, _TEXT, 32),
        "padding_mask": torch.zeros(1, 1, height, width, dtype=dtype),
        "return_dict": False,
    }


def _wan_s2v(od_config: Any) -> Any:  # noqa: ARG001 - the pipeline hands it none
    from vllm_omni.diffusion.models.wan2_2.wan2_2_s2v_transformer import WanS2VTransformer3DModel

    return WanS2VTransformer3DModel(
        cond_dim=4, audio_dim=16, num_audio_token=2, enable_adain=True, audio_inject_layers=[0, 1], in_dim=4, dim=32,
        ffn_dim=64, freq_dim=32, text_dim=32, out_dim=4, num_heads=2, num_layers=2, text_len=8,
    )  # fmt: skip


def _sana_wm(od_config: Any) -> Any:  # noqa: ARG001 - the pipeline hands it none
    from vllm_omni.diffusion.models.sana_wm.sana_wm_transformer import SanaWmConfig, SanaWmTransformer3DModel

    return SanaWmTransformer3DModel(
        SanaWmConfig(hidden_size=32, num_blocks=2, linear_head_dim=16, softmax_every_n=2),
        latent_channels=4,
        prompt_channels=32,
    )


def _sana_wm_inputs(size: int, dtype: torch.dtype) -> Mapping[str, Any]:
    draw = Draw(size, dtype)
    return {
        "hidden_states": draw.normal(1, 4, *_SHAPES[size]),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": draw.normal(1, _TEXT, 32),
    }


def _dreamzero(od_config: Any) -> Any:  # noqa: ARG001 - the pipeline hands it none
    from vllm_omni.diffusion.models.dreamzero.causal_wan_model import CausalWanModel

    return CausalWanModel(
        frame_seqlen=4, text_len=_TEXT, in_dim=4, dim=32, ffn_dim=64, freq_dim=32, text_dim=32, out_dim=4,
        num_heads=2, num_layers=2, action_dim=4, num_registers=2, max_state_dim=4, hidden_size=16,
        num_action_per_block=2,
    )  # fmt: skip


def _dreamzero_inputs(size: int, dtype: torch.dtype) -> Mapping[str, Any]:
    draw = Draw(size, dtype)
    frames, height, width = _SHAPES[size]
    rows = frames * height * width // 4
    return {
        "x": draw.normal(1, 4, frames, height, width),
        "timestep": torch.full((1, frames), 500.0),
        "context": draw.normal(1, _TEXT, 32),
        "seq_len": rows,
        "kv_cache": [draw.normal(2, 1, rows, 2, 16) for _ in range(2)],
        "current_start_frame": 1,
    }


def _lingbot_world(od_config: Any) -> Any:  # noqa: ARG001 - the pipeline hands it none
    from vllm_omni.diffusion.models.lingbot_world.transformer import CausalLingBotWorldTransformer3DModel

    transformer = CausalLingBotWorldTransformer3DModel(
        **_WAN, sink_size=1, num_frames_per_block=1, sliding_window_num_frames=4
    )
    for block in transformer.blocks:
        rope = block.self_attn.rotary_embedding
        rope._forward_method = functools.partial(_rope_per_head, rope)  # noqa: SLF001 - see there
    return transformer


def _rope_per_head(rope: Any, rows: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """What the host's kernel for accelerators does; its own path for others does not add the dimension of the heads."""
    out: torch.Tensor = rope.forward_native(rows, cosine[:, None], sine[:, None])
    return out


def _lingbot_world_inputs(size: int, dtype: torch.dtype) -> Mapping[str, Any]:
    from vllm_omni.diffusion.models.lingbot_world.transformer import allocate_lingbot_cache

    draw = Draw(size, dtype)
    _, height, width = _SHAPES[size]
    return {
        "hidden_states": draw.normal(1, 4, 1, height, width),
        "timestep": torch.full((1, 1), 500.0),
        "encoder_hidden_states": draw.normal(1, _TEXT, 32),
        "camera_hidden_states": draw.normal(1, 6 * 8 * 8, 1, height, width),
        "cache": allocate_lingbot_cache(
            batch_size=1, num_layers=2, max_tokens=height * width, num_local_heads=2, head_dim=16,
            device=torch.get_default_device(), dtype=dtype,
        ),
        "start_frame": 0,
        "update_cache": True,
    }  # fmt: skip


def _minimax_h3(od_config: Any) -> Any:
    from vllm_omni.diffusion.models.minimax_h3.minimax_h3_transformer import MiniMaxH3DiTModel

    transformer = MiniMaxH3DiTModel(od_config)
    transformer.rope.inv_freq.copy_(10000 ** (-torch.arange(16) / 16))  # comes with the checkpoint
    return transformer


def _minimax_h3_inputs(size: int, dtype: torch.dtype) -> Mapping[str, Any]:
    from vllm_omni.diffusion.models.minimax_h3.denoise_loop import MiniMaxH3DenoiseBranch
    from vllm_omni.diffusion.models.minimax_h3.packed_sequence import minimax_h3_packed_sequence

    draw = Draw(size, dtype)
    frames, height, width = _SHAPES[size]
    packed = minimax_h3_packed_sequence(
        text_len=_TEXT, latent_t=frames, latent_h=height, latent_w=width, audio_t=4, include_keyframe_cond=False
    )
    branch = MiniMaxH3DenoiseBranch(
        packed=packed, text_embeddings=draw.normal(_TEXT, 32), token_tags=packed["token_tags"],
        device=torch.get_default_device(),
    )  # fmt: skip
    inputs: Mapping[str, Any] = branch.forward_kwargs(
        video_rows=draw.normal(frames * height * width // 4, 96).float(), audio_rows=draw.normal(8, 32).float(),
        t_video=500.0, t_audio=500.0, imgvid_cond_timestep=0.0, audio_ref_cond_timestep=0.0,
    )  # fmt: skip
    return inputs


FAMILIES = (
    Family(name="wan2_2", pipeline="WanPipeline", build=_wan2_2, inputs=_wan_inputs),
    Family(name="helios", pipeline="HeliosPipeline", build=_helios, inputs=_wan_inputs),
    Family(name="hunyuan_video", pipeline="HunyuanVideo15Pipeline", config={"num_layers": 2}, build=_hunyuan_video,
           inputs=_hunyuan_inputs),
    Family(name="ltx2", pipeline="LTX2Pipeline", build=_ltx2, inputs=_ltx2_inputs),
    Family(name="lingbot_video", pipeline="LingBotVideoPipeline", build=_lingbot_video,
           inputs=_lingbot_video_inputs),
    Family(name="longcat_video", pipeline="LongCatVideoAvatarPipeline", build=_longcat_video, inputs=_longcat_inputs),
    Family(name="sana_video", pipeline="SanaVideoPipeline", build=_sana_video, inputs=_wan_inputs),
    Family(name="anima", pipeline="AnimaPipeline", build=_anima, inputs=_anima_inputs),
    Family(name="sana_wm", pipeline="SanaWmPipeline", build=_sana_wm, inputs=_sana_wm_inputs),
    Family(name="dreamzero", pipeline="DreamZeroPipeline", build=_dreamzero, inputs=_dreamzero_inputs,
           limits="its own setup_compile()"),
    Family(name="lingbot_world", pipeline="LingBotWorldCausalDMDPipeline", build=_lingbot_world,
           inputs=_lingbot_world_inputs),
    Family(
        name="minimax_h3",
        pipeline="MiniMaxH3Pipeline",
        config={
            "num_layers": 2, "token_refiner_num_layers": 2, "hidden_size": 128, "num_attention_heads": 1,
            "attention_head_dim": 128, "ffn_hidden_size": 256, "text_dim": 32, "timestep_input_dim": 32,
            "time_embed_hidden_size": 128, "time_embed_dim": 64, "adaln_out_features": 18 * 128,
            "final_adaln_out_features": 2 * 128,
        },
        dit_modules=("transformer",),
        build=_minimax_h3,
        inputs=_minimax_h3_inputs,
        dtypes=(torch.bfloat16,),
        limits="mixes fp32 and bf16 itself",
    ),
)  # fmt: skip
