"""Families that take audio latents as [batch, channels, frames]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tools.model_families.family import Draw, Family

_TEXT = 7
_FRAMES = {1: 16, 2: 24, 3: 40}


def _stable_audio(od_config: Any) -> Any:
    from vllm_omni.diffusion.models.stable_audio.stable_audio_transformer import StableAudioDiTModel

    return StableAudioDiTModel(
        od_config=od_config, sample_size=64, in_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        num_key_value_attention_heads=1, out_channels=4, cross_attention_dim=16, time_proj_dim=32,
        global_states_input_dim=24, cross_attention_input_dim=32,
    )  # fmt: skip


def _stable_audio_inputs(size: int, dtype: torch.dtype) -> Mapping[str, Any]:
    from diffusers.models.embeddings import get_1d_rotary_pos_embed

    draw = Draw(size, dtype)
    frames = _FRAMES[size]
    cosine, sine = get_1d_rotary_pos_embed(8, frames + 1, use_real=True, repeat_interleave_real=False)
    return {
        "hidden_states": draw.normal(1, 4, frames),
        "timestep": torch.tensor([0.5]),
        "encoder_hidden_states": draw.normal(1, _TEXT, 32),
        "global_hidden_states": draw.normal(1, 1, 24),
        "rotary_embedding": (cosine.to(dtype), sine.to(dtype)),
        "return_dict": False,
    }


def _cosyvoice3(od_config: Any) -> Any:  # noqa: ARG001 - its constructor takes none
    from vllm_omni.diffusion.models.cosyvoice3_audio.cosyvoice3_dit import DiT

    return DiT(dim=32, depth=2, heads=2, dim_head=16, dropout=0.0, ff_mult=2, mel_dim=8, mu_dim=8, spk_dim=8)


def _cosyvoice3_inputs(size: int, dtype: torch.dtype) -> Mapping[str, Any]:
    draw = Draw(size, dtype)
    frames = _FRAMES[size]
    return {
        "x": draw.normal(1, 8, frames),
        "mask": torch.ones(1, 1, frames, dtype=dtype),
        "mu": draw.normal(1, 8, frames),
        "t": torch.tensor([0.5], dtype=dtype),
        "spks": draw.normal(1, 8),
        "cond": draw.normal(1, 8, frames),
    }


def _omnivoice(od_config: Any) -> Any:
    from vllm_omni.model_executor.models.omnivoice import omnivoice_generator
    from vllm_omni.transformers_utils.configs.omnivoice import OmniVoiceConfig

    config = OmniVoiceConfig(
        audio_vocab_size=33,
        audio_mask_id=32,
        llm_config={
            "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
            "intermediate_size": 256, "vocab_size": 64, "head_dim": 16,
        },
    )  # fmt: skip
    # Its kernels are picked by whether Triton can be imported, not by whether it can run here.
    omnivoice_generator._TRITON_AVAILABLE = False  # noqa: SLF001 - there is no option
    return omnivoice_generator.OmniVoiceGenerator(config, od_config)


def _omnivoice_inputs(size: int, dtype: torch.dtype) -> Mapping[str, Any]:
    draw = Draw(size, dtype)
    target = _FRAMES[size]
    rows = 2 * target + _TEXT
    audio = torch.zeros(rows, dtype=torch.bool)
    audio[_TEXT:] = True
    ids = torch.full((rows, 8), 32)
    ids[:_TEXT] = draw.tokens(_TEXT, 1, below=64)
    return {
        "input_ids": ids,
        "audio_mask": audio,
        "cond_lens": [_TEXT + target],
        "target_lens": [target],
        "seed": size,
        "num_step": 2,
        "position_temperature": 0.0,
    }


FAMILIES = (
    Family(name="stable_audio", pipeline="StableAudioPipeline", build=_stable_audio, inputs=_stable_audio_inputs),
    Family(name="cosyvoice3_audio", pipeline="", path="transformer", build=_cosyvoice3, inputs=_cosyvoice3_inputs,
           limits="no pipeline of its own: a language-model stage calls it, the diffusion model runner never sees it"),
    Family(name="omnivoice", pipeline="OmniVoicePipeline", path="generator", build=_omnivoice,
           inputs=_omnivoice_inputs, dtypes=(torch.float32,),
           limits="its output is tokens, so parity means the same ones"),
)  # fmt: skip
