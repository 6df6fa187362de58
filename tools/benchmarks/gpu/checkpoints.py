"""Checkpoints with the real widths and random weights, for one GPU.

    python -m tools.benchmarks.gpu.checkpoints klein_3_9b [OUT]
    python -m tools.benchmarks.gpu.checkpoints wan_1_3b [OUT]

Klein has the released 5 blocks of two streams and 20 of one, 3.9 B parameters, and the VAE's defaults; Wan is the
1.3 B transformer of Wan2.1 and its VAE. Their text encoders have the real width and few layers. The weights are drawn
on the accelerator where there is one, which other devices do not repeat: the revision in a row tells.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tools.tiny_checkpoints import klein, wan
from tools.tiny_checkpoints.checkpoint import run

VERSION = "1"


def write_klein(out: Path) -> None:
    """Write Flux2-Klein into the empty folder `out`."""
    from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel

    transformer = functools.partial(
        Flux2Transformer2DModel,
        patch_size=1,
        in_channels=128,
        num_layers=5,
        num_single_layers=20,
        attention_head_dim=128,
        num_attention_heads=24,
        joint_attention_dim=3 * 2560,
        guidance_embeds=False,
    )
    klein.write(out, text_encoder=_qwen3, vae=AutoencoderKLFlux2, transformer=transformer)


def write_wan(out: Path) -> None:
    """Write Wan, text to video, into the empty folder `out`."""
    from diffusers import AutoencoderKLWan, WanTransformer3DModel
    from transformers import UMT5Config, UMT5EncoderModel

    transformer = functools.partial(
        WanTransformer3DModel, num_layers=30, num_attention_heads=12, attention_head_dim=128, ffn_dim=8960
    )
    encoder = UMT5Config(vocab_size=320, d_model=4096, d_kv=64, d_ff=10240, num_layers=2, num_heads=64)
    wan.write(
        out, text_encoder=lambda: UMT5EncoderModel(encoder), vae=AutoencoderKLWan, transformer=transformer
    )  # fmt: skip


def _qwen3() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=320,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    config.text_encoder_out_layers = klein.ENCODER_LAYERS_READ
    config.architectures = ["Qwen3ForCausalLM"]
    return Qwen3ForCausalLM(config)


_CHECKPOINTS: dict[str, Callable[[Path], None]] = {"klein_3_9b": write_klein, "wan_1_3b": write_wan}


def main(arguments: list[str]) -> None:
    """Write the checkpoint that the command line names, unless it is there."""
    name = arguments[0] if arguments else ""
    if name not in _CHECKPOINTS:
        raise SystemExit(f"found {name!r}, expected one of: {', '.join(_CHECKPOINTS)}")
    if torch.cuda.is_available():
        torch.set_default_device("cuda")
    run(name, VERSION, _CHECKPOINTS[name], arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
