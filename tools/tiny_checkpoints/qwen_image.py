"""A Qwen-Image (text to image) of 3 MB: `python -m tools.tiny_checkpoints.qwen_image [OUT]`.

Its pipeline runs several requests through the transformer at once, which Flux2-Klein does not. Its pictures are noise.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tools.tiny_checkpoints.checkpoint import byte_tokenizer, run, write_json

if TYPE_CHECKING:
    from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
    from transformers import Qwen2_5_VLForConditionalGeneration

VERSION = "1"
SEED = 0
TEXT_WIDTH = 64
LATENT_CHANNELS = 4

CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def write(out: Path) -> None:
    """Write the checkpoint into the empty folder `out`."""
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler

    torch.manual_seed(SEED)
    byte_tokenizer(["<|im_start|>"], CHAT_TEMPLATE).save_pretrained(out / "tokenizer")
    _text_encoder().to(torch.bfloat16).save_pretrained(out / "text_encoder")
    _vae().to(torch.bfloat16).save_pretrained(out / "vae")
    _transformer().to(torch.bfloat16).save_pretrained(out / "transformer")
    FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True).save_pretrained(out / "scheduler")
    write_json(
        out / "model_index.json",
        {
            "_class_name": "QwenImagePipeline",
            "_diffusers_version": "0.40.0",
            "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
            "text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
            "tokenizer": ["transformers", "Qwen2Tokenizer"],
            "transformer": ["diffusers", "QwenImageTransformer2DModel"],
            "vae": ["diffusers", "AutoencoderKLQwenImage"],
        },
    )


def _text_encoder() -> Qwen2_5_VLForConditionalGeneration:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 320,
            "hidden_size": TEXT_WIDTH,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        },
        # The pipeline drops the tower; it has to be there to be loaded.
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": TEXT_WIDTH,
            "fullatt_block_indexes": [0],
        },
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def _vae() -> AutoencoderKLQwenImage:
    from diffusers import AutoencoderKLQwenImage

    return AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        latents_mean=[0.0] * LATENT_CHANNELS,
        latents_std=[1.0] * LATENT_CHANNELS,
    )


def _transformer() -> QwenImageTransformer2DModel:
    from diffusers import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=4 * LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=2,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=TEXT_WIDTH,
        axes_dims_rope=(8, 12, 12),
    )


if __name__ == "__main__":
    run("qwen_image", VERSION, write)
