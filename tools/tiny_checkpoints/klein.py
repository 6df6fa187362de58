"""A Flux2-Klein (text to image) of 3 MB: `python -m tools.tiny_checkpoints.klein [OUT]`.

The architecture is the real one, with two double-stream and two single-stream blocks 128 wide. Its pictures are noise.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tools.tiny_checkpoints.checkpoint import byte_tokenizer, run, write_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel
    from transformers import Qwen3ForCausalLM

VERSION = "1"
SEED = 0
TEXT_WIDTH = 64
LATENT_CHANNELS = 4
# The VAE's latent is folded 2x2 into channels before it meets the transformer.
TRANSFORMER_CHANNELS = 4 * LATENT_CHANNELS
# The pipeline concatenates the hidden states of three encoder layers.
ENCODER_LAYERS_READ = [1, 2, 3]

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write(
    out: Path,
    *,
    text_encoder: Callable[[], Qwen3ForCausalLM] | None = None,
    vae: Callable[[], AutoencoderKLFlux2] | None = None,
    transformer: Callable[[], Flux2Transformer2DModel] | None = None,
) -> None:
    """Write the checkpoint into the empty folder `out`; the makers given replace the tiny components."""
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler

    torch.manual_seed(SEED)
    byte_tokenizer(["<|im_start|>"], CHAT_TEMPLATE).save_pretrained(out / "tokenizer")
    (text_encoder or _text_encoder)().to(torch.bfloat16).save_pretrained(out / "text_encoder")
    (vae or _vae)().to(torch.bfloat16).save_pretrained(out / "vae")
    (transformer or tiny_transformer)().to(torch.bfloat16).save_pretrained(out / "transformer")
    FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, shift=3.0, base_shift=0.5, max_shift=1.15
    ).save_pretrained(out / "scheduler")
    write_json(
        out / "model_index.json",
        {
            "_class_name": "Flux2KleinPipeline",
            "_diffusers_version": "0.40.0",
            # Not distilled, so that classifier-free guidance runs both of its branches.
            "is_distilled": False,
            "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
            "text_encoder": ["transformers", "Qwen3ForCausalLM"],
            "tokenizer": ["transformers", "Qwen2TokenizerFast"],
            "transformer": ["diffusers", "Flux2Transformer2DModel"],
            "vae": ["diffusers", "AutoencoderKLFlux2"],
        },
    )


def _text_encoder() -> Qwen3ForCausalLM:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=320,
        hidden_size=TEXT_WIDTH,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    config.text_encoder_out_layers = ENCODER_LAYERS_READ
    config.architectures = ["Qwen3ForCausalLM"]
    return Qwen3ForCausalLM(config)


def _vae() -> AutoencoderKLFlux2:
    from diffusers import AutoencoderKLFlux2

    return AutoencoderKLFlux2(
        block_out_channels=(16, 16, 16, 16),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=8,
        sample_size=64,
    )


def tiny_transformer(num_layers: int = 2, num_single_layers: int = 2) -> Flux2Transformer2DModel:
    """Make the transformer with so many blocks of two streams and of one."""
    from diffusers import Flux2Transformer2DModel

    return Flux2Transformer2DModel(
        patch_size=1,
        in_channels=TRANSFORMER_CHANNELS,
        num_layers=num_layers,
        num_single_layers=num_single_layers,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=len(ENCODER_LAYERS_READ) * TEXT_WIDTH,
        timestep_guidance_channels=32,
        mlp_ratio=2.0,
        axes_dims_rope=(8, 8, 8, 8),
        guidance_embeds=False,
    )


if __name__ == "__main__":
    run("klein", VERSION, write)
