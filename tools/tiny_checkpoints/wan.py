"""A Wan2.2 (text to video) of 2 MB: `python -m tools.tiny_checkpoints.wan [OUT]`.

The architecture is the real one, with one transformer in place of two. Its videos are noise.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tools.tiny_checkpoints.checkpoint import byte_tokenizer, run, write_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from diffusers import AutoencoderKLWan, WanTransformer3DModel
    from transformers import UMT5EncoderModel

VERSION = "1"
SEED = 0
TEXT_WIDTH = 64
LATENT_CHANNELS = 4


def write(
    out: Path,
    *,
    text_encoder: Callable[[], UMT5EncoderModel] | None = None,
    vae: Callable[[], AutoencoderKLWan] | None = None,
    transformer: Callable[[], WanTransformer3DModel] | None = None,
) -> None:
    """Write the checkpoint into the empty folder `out`; the makers given replace the tiny components."""
    import torch
    from diffusers import UniPCMultistepScheduler

    torch.manual_seed(SEED)
    byte_tokenizer([], "").save_pretrained(out / "tokenizer")
    (text_encoder or _text_encoder)().to(torch.bfloat16).save_pretrained(out / "text_encoder")
    (vae or _vae)().to(torch.bfloat16).save_pretrained(out / "vae")
    (transformer or _transformer)().to(torch.bfloat16).save_pretrained(out / "transformer")
    UniPCMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=5.0).save_pretrained(
        out / "scheduler"
    )
    write_json(
        out / "model_index.json",
        {
            "_class_name": "WanPipeline",
            "_diffusers_version": "0.40.0",
            "scheduler": ["diffusers", "UniPCMultistepScheduler"],
            "text_encoder": ["transformers", "UMT5EncoderModel"],
            "tokenizer": ["transformers", "Qwen2TokenizerFast"],
            "transformer": ["diffusers", "WanTransformer3DModel"],
            "vae": ["diffusers", "AutoencoderKLWan"],
        },
    )


def _text_encoder() -> UMT5EncoderModel:
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(
        UMT5Config(vocab_size=320, d_model=TEXT_WIDTH, d_kv=16, d_ff=128, num_layers=2, num_heads=4)
    )  # fmt: skip


def _vae() -> AutoencoderKLWan:
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(
        base_dim=8,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        latents_mean=[0.0] * LATENT_CHANNELS,
        latents_std=[1.0] * LATENT_CHANNELS,
    )


def _transformer() -> WanTransformer3DModel:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=32,
        text_dim=TEXT_WIDTH,
        freq_dim=32,
        ffn_dim=128,
    )


if __name__ == "__main__":
    run("wan", VERSION, write)
