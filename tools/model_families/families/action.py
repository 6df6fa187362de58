"""Families that predict actions of a robot: a vision-language model and a small denoiser beside it."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tools.model_families.family import Draw, Family

_HORIZON = {1: 4, 2: 6, 3: 10}
# Steps and numbers of each in an action: with a few numbers a distance from fp32 is chance.
_CHUNK, _ACTION = 32, 16
_VISION = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 14, "image_size": 28,
}  # fmt: skip


def _pi(module: Any, model_class: str, config: Any) -> Any:
    """Build either model; most of its sizes are constants of its code, so they are replaced while it is built."""
    from transformers import GemmaConfig, PaliGemmaConfig

    def paligemma() -> Any:
        return PaliGemmaConfig(vision_config=dict(_VISION), text_config={"model_type": "gemma"})

    def shrunk(model: Any) -> Any:
        def build(*, config: Any) -> Any:
            for part in (config, getattr(config, "text_config", config)):
                part.vocab_size = 64
            if vision := getattr(config, "vision_config", None):
                vision.intermediate_size, vision.projection_dim = 64, 32
            return model(config=config)

        return build

    small = module.GemmaVariantConfig(32, 2, 64, 2, 1, 16)
    replaced = {
        "get_gemma_config": lambda _: small,
        "CONFIG_MAPPING": {"paligemma": paligemma, "gemma": GemmaConfig},
        "PaliGemmaForConditionalGeneration": shrunk(module.PaliGemmaForConditionalGeneration),
        "GemmaForCausalLM": shrunk(module.GemmaForCausalLM),
    }
    with mock.patch.multiple(module, **replaced):
        model = getattr(module, model_class)(config)
    return model.to(torch.get_default_dtype())  # as the pipeline does


def _pi0(od_config: Any) -> Any:  # noqa: ARG001 - the pipeline hands it none
    from vllm_omni.diffusion.models.pi0 import modeling_pi0
    from vllm_omni.diffusion.models.pi0.config import Pi0Config

    return _pi(
        modeling_pi0,
        "Pi0ForActionPrediction",
        Pi0Config(max_action_dim=_ACTION, max_state_dim=_ACTION, chunk_size=_CHUNK),
    )


def _pi05(od_config: Any) -> Any:  # noqa: ARG001 - the pipeline hands it none
    from vllm_omni.diffusion.models.pi05 import modeling_pi05
    from vllm_omni.diffusion.models.pi05.config import Pi05Config

    config = Pi05Config(
        max_action_dim=_ACTION, max_state_dim=_ACTION, chunk_size=_CHUNK, n_action_steps=_CHUNK, max_cameras=1
    )
    return _pi(modeling_pi05, "Pi05ForActionPrediction", config)


def _pi_inputs(size: int, dtype: torch.dtype) -> Mapping[str, Any]:
    draw = Draw(size, dtype)
    text = _HORIZON[size]
    return {
        "images": [draw.normal(1, 3, 28, 28)],
        "image_masks": [torch.ones(1, dtype=torch.bool)],
        "lang_tokens": draw.tokens(1, text, below=64),
        "lang_masks": torch.ones(1, text, dtype=torch.bool),
        "noise": draw.normal(1, _CHUNK, _ACTION).float(),
        "num_steps": 2,
    }


def _pi0_inputs(size: int, dtype: torch.dtype) -> Mapping[str, Any]:
    return {**_pi_inputs(size, dtype), "state": Draw(size + 10, dtype).normal(1, _ACTION)}


def _sample(model: Any, inputs: Mapping[str, Any]) -> Any:
    return model.sample_actions(**inputs)


def _gr00t(od_config: Any) -> Any:  # noqa: ARG001 - the pipeline hands it none
    from transformers import Qwen3VLConfig
    from vllm_omni.diffusion.models.gr00t.configs.gr00t_n1d7 import Gr00tN1d7Config
    from vllm_omni.diffusion.models.gr00t.modeling import gr00t_n1d7

    backbone = Qwen3VLConfig(
        image_token_id=63,
        text_config={
            "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2],
                                "mrope_interleaved": True},
        },
        vision_config={
            "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 32,
            "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
        },
    )  # fmt: skip
    config = Gr00tN1d7Config(
        backbone_embedding_dim=32, select_layer=2, max_state_dim=4, max_action_dim=4, action_horizon=4, hidden_size=16,
        input_embedding_dim=32, max_seq_len=32, num_inference_timesteps=2, max_num_embodiments=2,
        diffusion_model_cfg={
            "positional_embeddings": None, "num_layers": 4, "num_attention_heads": 2, "attention_head_dim": 16,
            "norm_type": "ada_norm", "output_dim": 16, "interleave_self_attention": True,
        },
    )  # fmt: skip
    hub = SimpleNamespace(from_pretrained=lambda *_, **__: backbone)
    with (
        mock.patch.object(gr00t_n1d7, "AutoConfig", hub),
        mock.patch.object(gr00t_n1d7, "Gr00tN1d7DataCollator", return_value=None),
    ):
        model = gr00t_n1d7.Gr00tN1d7(config)
    return model.to(torch.get_default_dtype())


def _gr00t_inputs(size: int, dtype: torch.dtype) -> Mapping[str, Any]:
    draw = Draw(size, dtype)
    text = _HORIZON[size]
    return {
        "input_ids": draw.tokens(1, text, below=60),
        "attention_mask": torch.ones(1, text, dtype=torch.long),
        "state": draw.normal(1, 1, 4),
        "embodiment_id": torch.zeros(1, dtype=torch.long),
    }


def _gr00t_call(model: Any, inputs: Mapping[str, Any]) -> Any:
    from transformers.feature_extraction_utils import BatchFeature

    seen = model.backbone({name: inputs[name] for name in ("input_ids", "attention_mask")})
    action = BatchFeature(data={name: inputs[name] for name in ("state", "embodiment_id")})
    options = {"generator": torch.Generator().manual_seed(inputs["input_ids"].shape[1])}
    return model.action_head.get_action(seen, action, options)["action_pred"]


FAMILIES = (
    Family(name="pi0", pipeline="Pi0Pipeline", path="model", build=_pi0, inputs=_pi0_inputs, call=_sample,
           limits="calls the parts of its blocks, never the blocks"),
    Family(name="pi05", pipeline="Pi05Pipeline", path="model", build=_pi05, inputs=_pi_inputs, call=_sample,
           limits="calls the parts of its blocks, never the blocks"),
    Family(name="gr00t", pipeline="Gr00tN1d7Pipeline", path="policy.model", plain_parents=True, build=_gr00t,
           inputs=_gr00t_inputs, call=_gr00t_call, limits="its policy is no module"),
)  # fmt: skip
