"""A MiniMax-H3 (video with audio) of 2 x 17 MB: `python -m tools.tiny_checkpoints.minimax_h3 [OUT]`.

Serve `OUT/FL2VA` (text, or one or two keyframes) or `OUT/Ref2VA` (reference images; videos and sounds, too, where
ffmpeg is installed) with `--trust-remote-code`: as in the real checkpoint, both VAEs are code in the checkpoint. Theirs
is not public, so `minimax_h3_remote/` holds stand-ins with the contracts that vLLM-Omni uses. The weights of the
transformer carry the names and shapes of the installed vLLM-Omni's own module, so this needs an environment with the
host.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.tiny_checkpoints.checkpoint import byte_tokenizer, run, write_json

if TYPE_CHECKING:
    import torch

VERSION = "3"
SEED = 0
# The tasks of each partition; the first one lends the other one everything but the transformer.
PARTITIONS = {"FL2VA": ["t2va", "fl2va"], "Ref2VA": ["ref2va"]}
REMOTE_CODE = Path(__file__).with_name("minimax_h3_remote")

# vLLM-Omni's encoder for this model hard-codes the width of the text states.
TEXT_WIDTH = 5120
WIDTH = 128
VIDEO_CHANNELS = 24
AUDIO_CHANNELS = 32
SPECIAL_TOKENS = [
    "<|im_start|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]

TRANSFORMER: dict[str, Any] = {
    "num_layers": 3,
    "token_refiner_num_layers": 1,
    "hidden_size": WIDTH,
    "num_attention_heads": 1,
    "attention_head_dim": WIDTH,
    "ffn_hidden_size": 2 * WIDTH,
    "latents_dim": VIDEO_CHANNELS,
    "audio_latents_dim": AUDIO_CHANNELS,
    "patch_size": [1, 2, 2],
    "text_dim": TEXT_WIDTH,
    "timestep_input_dim": 32,
    "time_embed_hidden_size": WIDTH,
    "time_embed_dim": 64,
    "adaln_out_features": 18 * WIDTH,
    "final_adaln_out_features": 2 * WIDTH,
    "rope_inv_freq_len": 16,
}


def write(out: Path) -> None:
    """Write the checkpoint into the empty folder `out`."""
    import torch

    torch.manual_seed(SEED)
    (first, *_) = PARTITIONS
    token_ids = _write_tokenizer(out / first)
    _write_text_encoder(out / first / "text_encoder", token_ids)
    _write_vaes(out / first)
    for name in PARTITIONS:
        if name != first:
            shutil.copytree(out / first, out / name)
    for name, tasks in PARTITIONS.items():
        write_json(
            out / name / "model_index.json",
            {
                "_class_name": "MiniMaxH3Pipeline",
                "_diffusers_version": "0.40.0",
                "_minimax_h3": {
                    "partition": name.lower(),
                    "tasks": tasks,
                    "sigma_shift_scales": {"video": 12.0, "audio": 3.0},
                },
                "transformer": ["vllm_omni", "MiniMaxH3DiTModel"],
            },
        )
    _write_transformers([out / name / "transformer" for name in PARTITIONS])


def _write_tokenizer(partition: Path) -> dict[str, int]:
    """Write tokenizer and processor; returns the ids of the special tokens."""
    tokenizer = byte_tokenizer(SPECIAL_TOKENS, "{% for m in messages %}{{ m['content'] }}{% endfor %}")
    tokenizer.save_pretrained(partition / "tokenizer")
    tokenizer.save_pretrained(partition / "processor")
    vision = {
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "processor_class": "Qwen3VLProcessor",
    }
    write_json(
        partition / "processor" / "preprocessor_config.json",
        vision
        | {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "size": {"shortest_edge": 65536, "longest_edge": 16777216},
        },
    )
    write_json(
        partition / "processor" / "video_preprocessor_config.json",
        vision
        | {"video_processor_type": "Qwen3VLVideoProcessor", "size": {"shortest_edge": 4096, "longest_edge": 25165824}},
    )
    return {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}


def _write_text_encoder(folder: Path, token_ids: dict[str, int]) -> None:
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    config = Qwen3VLConfig(
        image_token_id=token_ids["<|image_pad|>"],
        video_token_id=token_ids["<|video_pad|>"],
        vision_start_token_id=token_ids["<|vision_start|>"],
        vision_end_token_id=token_ids["<|vision_end|>"],
        text_config={
            "vocab_size": 320,
            "hidden_size": TEXT_WIDTH,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": TEXT_WIDTH,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
    )
    config.architectures = ["Qwen3VLForConditionalGeneration"]
    Qwen3VLForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(folder)


def _write_vaes(partition: Path) -> None:
    for name, channels, extra in (
        ("video_vae", VIDEO_CHANNELS, {}),
        ("audio_vae", AUDIO_CHANNELS, {"sample_rate": 32000}),
    ):
        shutil.copytree(REMOTE_CODE / name, partition / name, ignore=shutil.ignore_patterns("__pycache__"))
        write_json(
            partition / name / "config.json",
            {
                "latent_channels": channels,
                "latents_mean": [0.0] * channels,
                "latents_std": [1.0] * channels,
                "auto_map": {"AutoModel": f"modeling_tiny_{name}.TinyVAE"},
            }
            | extra,
        )


def _write_transformers(folders: Sequence[Path]) -> None:
    """Save random values under the names and shapes of vLLM-Omni's own module, which is built for that on one rank."""
    import torch
    from safetensors.torch import save_file
    from torch._C._distributed_c10d import HashStore
    from vllm.config import set_current_vllm_config
    from vllm_omni.diffusion.data import OmniDiffusionConfig, TransformerConfig
    from vllm_omni.diffusion.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from vllm_omni.diffusion.forward_context import set_forward_context
    from vllm_omni.diffusion.vllm_config import create_diffusion_vllm_config

    # One rank in one process: an in-memory store in place of a port.
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    od_config = OmniDiffusionConfig(
        model=str(folders[0].parent),
        model_class_name="MiniMaxH3Pipeline",
        tf_model_config=TransformerConfig.from_dict(TRANSFORMER),
    )
    vllm_config = create_diffusion_vllm_config(torch.device("cpu"), od_config)
    with (
        set_forward_context(vllm_config=vllm_config, omni_diffusion_config=od_config),
        set_current_vllm_config(vllm_config),
    ):
        init_distributed_environment(world_size=1, rank=0)
        initialize_model_parallel()
        from vllm_omni.diffusion.models.minimax_h3.minimax_h3_transformer import MiniMaxH3DiTModel

        # From 0.30 on it also knows the names of a Diffusers checkpoint; before, there were its own alone.
        native = {"diffusers_weights": False} if "diffusers_weights" in signature(MiniMaxH3DiTModel).parameters else {}
        model = MiniMaxH3DiTModel(od_config, **native)
    named: dict[str, torch.Tensor] = dict(model.named_parameters()) | dict(model.named_buffers())
    for index, folder in enumerate(folders):
        write_json(folder / "config.json", TRANSFORMER | {"_class_name": "MiniMaxH3DiTModel"})
        torch.manual_seed(SEED + index)
        save_file(
            {name: _initial(name, tensor).to(tensor.dtype).contiguous() for name, tensor in named.items()},
            folder / "diffusion_pytorch_model.safetensors",
        )
    torch.distributed.destroy_process_group()


def _initial(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return values that keep the activations finite through any number of steps."""
    import torch

    if name == "rope.inv_freq":
        steps = torch.arange(tensor.numel(), dtype=torch.float32) / tensor.numel()
        return (10000.0**-steps).reshape(tensor.shape)
    if "norm" in name and name.endswith("weight"):
        return torch.ones(tensor.shape)
    return torch.randn(tensor.shape) * 0.02


if __name__ == "__main__":
    run("minimax_h3", VERSION, write)
