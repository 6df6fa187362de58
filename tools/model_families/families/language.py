"""Families whose denoiser is a language model: token rows and image rows in one sequence."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from tools.model_families.family import Draw, Family

_ROWS = {1: 12, 2: 18, 3: 28}
_QWEN = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 128,
}  # fmt: skip


def _bagel(od_config: Any) -> Any:
    from vllm_omni.diffusion.models.bagel.bagel_transformer import Qwen2MoTConfig, Qwen2MoTForCausalLM

    config = Qwen2MoTConfig(**_QWEN, pad_token_id=0)
    return Qwen2MoTForCausalLM(config, parallel_config=od_config.parallel_config, prefix="bagel.language_model")


def _bagel_inputs(size: int, dtype: torch.dtype) -> Mapping[str, Any]:
    from vllm_omni.diffusion.models.bagel.bagel_transformer import NaiveCache

    rows = _ROWS[size]
    return {
        "packed_query_sequence": Draw(size, dtype).normal(rows, 32),
        "query_lens": torch.tensor([rows]),
        "packed_query_position_ids": torch.arange(rows),
        "past_key_values": NaiveCache(2),
        "update_past_key_values": False,
        "is_causal": False,
        "mode": "gen",
        "packed_text_indexes": torch.tensor([0, rows - 1]),
        "packed_vae_token_indexes": torch.arange(1, rows - 1),
    }


def _sensenova_u1(od_config: Any) -> Any:  # noqa: ARG001 - the pipeline hands it none
    from transformers import Qwen3Config
    from vllm_omni.diffusion.models.sensenova_u1.sensenova_u1_transformer import SenseNovaU1ForCausalLM

    # It picks this kernel by whether Triton can be imported, not by whether it can run here.
    sys.modules["vllm_omni.diffusion.models.sensenova_u1.fused_rmsnorm_rope"] = None  # type: ignore[assignment]

    config = Qwen3Config(
        **_QWEN, head_dim=16, attention_bias=False, rope_theta_hw=10000.0, max_position_embeddings_hw=128
    )
    config.rope_theta = 10000.0
    return SenseNovaU1ForCausalLM(config, prefix="language_model")


def _sensenova_inputs(size: int, dtype: torch.dtype) -> Mapping[str, Any]:
    rows = _ROWS[size]
    positions = torch.arange(rows)
    return {
        "inputs_embeds": Draw(size, dtype).normal(1, rows, 32),
        "indexes": torch.stack([positions, positions // 4, positions % 4]),
        "attention_mask": {"full_attention": None},
        "image_gen_indicators": torch.ones(1, rows, dtype=torch.bool),
        "use_cache": False,
        "compute_logits": False,
    }


def _hidream_o1(od_config: Any) -> Any:  # noqa: ARG001 - the pipeline hands it none
    from transformers import Qwen3VLConfig
    from vllm_omni.diffusion.models.hidream_o1_image.hidream_o1_image_transformer import HiDreamO1ImageTransformer

    text = {
        **_QWEN, "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2],
                            "mrope_interleaved": True},
    }  # fmt: skip
    transformer = HiDreamO1ImageTransformer(Qwen3VLConfig(text_config=text))
    transformer.model.tms_token_id = 63  # the real one's vocabulary would outweigh the blocks of a small model
    return transformer


def _hidream_o1_inputs(size: int, dtype: torch.dtype) -> Mapping[str, Any]:
    draw = Draw(size, dtype)
    text, image = 5, _ROWS[size]
    ids = draw.tokens(1, text, below=60)
    ids[0, -1] = 63
    return {
        "input_ids": ids,
        "position_ids": torch.arange(text + image).expand(3, 1, text + image),
        "vinputs": draw.normal(1, image, 32 * 32 * 3),
        "timestep": torch.tensor([0.5]),
        "attention_mask": torch.zeros(1, 1, text + image, text + image, dtype=dtype),
        "full_attn_spans": [[]],
    }


def _nextstep(od_config: Any) -> Any:  # noqa: ARG001 - the pipeline hands it none
    from vllm_omni.diffusion.models.nextstep_1_1.modeling_nextstep import NextStepConfig, NextStepModel

    return NextStepModel(
        NextStepConfig(**_QWEN, latent_size=8, latent_channels=4, fm_head_dim=32, fm_head_layers=2, pad_token_id=0)
    )


def _nextstep_inputs(size: int, dtype: torch.dtype) -> Mapping[str, Any]:
    draw = Draw(size, dtype)
    return {
        "inputs_embeds": draw.normal(1, _ROWS[size], 32),
        "attention_mask": torch.ones(1, _ROWS[size], dtype=torch.long),
        "use_cache": False,
        "noise": draw.normal(_ROWS[size], 16),
    }


def _nextstep_call(model: Any, inputs: Mapping[str, Any]) -> Any:
    # One token's denoise step, as the pipeline takes it for each: the language model, then the head on what it says.
    inputs = dict(inputs)
    noise = inputs.pop("noise")
    states = model.forward_model(**inputs).last_hidden_state
    return model.image_head.net(noise, torch.full((len(noise),), 0.5), states.flatten(0, 1))


def _hunyuan_image3(od_config: Any) -> Any:  # noqa: ARG001 - the pipeline hands it none
    from vllm_omni.diffusion.models.hunyuan_image3.hunyuan_image3_transformer import (
        HunyuanImage3Config,
        HunyuanImage3Model,
    )

    return HunyuanImage3Model(HunyuanImage3Config(**_QWEN, attention_head_dim=16, use_qk_norm=True))


def _hunyuan_image3_inputs(size: int, dtype: torch.dtype) -> Mapping[str, Any]:
    image, text = _ROWS[size], 5
    rows = text + image
    angles = torch.arange(rows)[:, None] / 10000 ** (torch.arange(8) / 8)
    return {
        "inputs_embeds": Draw(size, dtype).normal(1, rows, 32),
        "attention_mask": torch.ones(1, 1, rows, rows, dtype=torch.bool),
        "position_ids": torch.arange(rows)[None],
        "custom_pos_emb": (angles.cos()[None], angles.sin()[None]),
        "mode": "gen_image",
        "first_step": True,
        "query_lens": [rows],
        "seq_lens": [rows],
        "num_image_tokens": image,
        "gen_timestep_scatter_index": torch.tensor([[text]]),
        "use_cache": False,
        "return_dict": False,
    }


def _cosmos3(od_config: Any) -> Any:
    from vllm_omni.diffusion.models.cosmos3.transformer_cosmos3 import Cosmos3VFMTransformer

    transformer = Cosmos3VFMTransformer(od_config)
    transformer.time_embedder.float()  # as the pipeline loads it
    return transformer


def _cosmos3_inputs(size: int, dtype: torch.dtype) -> Mapping[str, Any]:
    draw = Draw(size, dtype)
    shape = {1: (2, 4, 4), 2: (2, 4, 6), 3: (3, 6, 8)}[size]
    return {
        "hidden_states": draw.normal(1, 4, *shape),
        "timestep": torch.tensor([500.0]),
        "text_ids": draw.tokens(1, 5, below=64),
        "text_mask": torch.ones(1, 5, dtype=torch.long),
        "video_shape": shape,
        "fps": 24.0,
    }


def _cosmos3_call(transformer: Any, inputs: Mapping[str, Any]) -> Any:
    # As the pipeline does at the start of a request: both are kept from step to step of one.
    transformer.cached_kv = transformer.cached_freqs_gen = None
    return transformer(**inputs)


FAMILIES = (
    Family(name="bagel", pipeline="BagelPipeline", path="language_model", build=_bagel, inputs=_bagel_inputs,
           dtypes=(torch.bfloat16,), limits="casts its rows to bf16 itself",
           also={"transformer": lambda language_model: language_model.model}),
    Family(name="lance", pipeline="LancePipeline", path="language_model", build=_bagel, inputs=_bagel_inputs,
           dtypes=(torch.bfloat16,), limits="casts its rows to bf16 itself",
           also={"transformer": lambda language_model: language_model.model}),
    Family(name="sensenova_u1", pipeline="SenseNovaU1Pipeline", path="language_model", build=_sensenova_u1,
           inputs=_sensenova_inputs, also={"transformer": lambda language_model: language_model.model}),
    Family(name="hidream_o1_image", pipeline="HiDreamO1ImagePipeline", path="model", build=_hidream_o1,
           inputs=_hidream_o1_inputs),
    Family(name="nextstep_1_1", pipeline="NextStep11Pipeline", path="model", build=_nextstep,
           inputs=_nextstep_inputs, call=_nextstep_call),
    Family(name="hunyuan_image3", pipeline="HunyuanImage3ForCausalMM", path="model", build=_hunyuan_image3,
           inputs=_hunyuan_image3_inputs, dtypes=(torch.bfloat16,), limits="casts its queries and keys to bf16 itself",
           also={"transformer": lambda model: model}),
    Family(
        name="cosmos3",
        pipeline="Cosmos3OmniDiffusersPipeline",
        config={
            "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
            "head_dim": 16, "intermediate_size": 64, "vocab_size": 64, "latent_channel": 4,
            "rope_scaling": {"mrope_section": [4, 2, 2]},
        },
        build=_cosmos3,
        inputs=_cosmos3_inputs,
        call=_cosmos3_call,
    ),
)  # fmt: skip
