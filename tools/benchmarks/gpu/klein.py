"""Flux2-Klein with its real widths and random weights, in process through `Omni`: one arm a process, one file an arm.

    VLLM_PLUGINS=vllm_omni_register_models python -m tools.benchmarks.gpu.klein CHECKPOINT OUT.json
    python -m tools.benchmarks.gpu.klein CHECKPOINT OUT.json --ours --declared
    python -m tools.benchmarks.gpu.klein CHECKPOINT OUT.json --ours '{"diffusion_compile_granularity": "full"}'

The first is stock. Give each arm an empty VLLM_CACHE_ROOT, or that of an earlier one for a warm start, and TMPDIR, and
run all arms on one machine.
CHECKPOINT is written where it does not exist (5 transformer blocks of two streams and 20 of one, 3.9 B parameters; the
VAE's defaults; a text encoder of 4 layers). `--tiny` serves a tiny checkpoint, for a dry run without an accelerator.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

SIZES = ((1024, 1024), (1344, 768), (768, 768))
STEPS = 4
FURTHER_REQUESTS = 10


def write_checkpoint(out: Path) -> None:
    """Write the checkpoint; on the accelerator, where random numbers are cheap."""
    from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from tools.tiny_checkpoints import klein

    def text_encoder() -> Any:
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

    def transformer() -> Any:
        return Flux2Transformer2DModel(
            patch_size=1,
            in_channels=128,
            num_layers=5,
            num_single_layers=20,
            attention_head_dim=128,
            num_attention_heads=24,
            joint_attention_dim=3 * 2560,
            guidance_embeds=False,
        )

    out.mkdir(parents=True)
    torch.set_default_device("cuda")
    klein.write(out, text_encoder=text_encoder, vae=AutoencoderKLFlux2, transformer=transformer)


def _sizes(tiny: bool) -> tuple[tuple[int, int], ...]:
    return ((256, 256), (256, 320)) if tiny else SIZES


def measure(model: Path, settings: dict[str, Any], *, tiny: bool) -> dict[str, Any]:
    """Start `Omni`, then time the first and the further requests of each size."""
    from torch._dynamo.utils import counters
    from vllm_omni.entrypoints.omni import Omni
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

    started = time.perf_counter()
    omni = Omni(model=str(model), stage_init_timeout=1800, init_timeout=1800, **settings)
    result: dict[str, Any] = {"settings": settings, "ready_s": time.perf_counter() - started}
    result["graphs_before_ready"] = counters["stats"]["unique_graphs"]

    def request(width: int, height: int) -> float:
        params = OmniDiffusionSamplingParams(width=width, height=height, num_inference_steps=STEPS, seed=1)
        start = time.perf_counter()
        omni.generate({"prompt": "a lighthouse at dusk"}, params, use_tqdm=False)
        return time.perf_counter() - start

    for width, height in _sizes(tiny):
        before = counters["stats"]["unique_graphs"]
        first, *further = [request(width, height) for _ in range(1 + FURTHER_REQUESTS)]
        result[f"{width}x{height}"] = {
            "first_s": first, "median_s": statistics.median(further), "further_s": further,
            "graphs": counters["stats"]["unique_graphs"] - before,
        }  # fmt: skip
    if torch.cuda.is_available():
        result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return result


def main() -> None:
    """Measure one arm and write it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("settings", nargs="?", type=json.loads, default={}, help="keyword arguments of Omni, as JSON")
    parser.add_argument("--ours", action="store_true", help="register this package, as an offline program does")
    parser.add_argument("--declared", action="store_true", help="declare the sizes that are measured")
    parser.add_argument("--tiny", action="store_true", help="the checkpoint is a tiny one that exists")
    parser.add_argument("--write-only", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args()  # settings may stand behind the flags
    if options.write_only:
        write_checkpoint(options.checkpoint)
        return
    if not options.tiny and not options.checkpoint.exists():
        # In a process of its own, so that its memory and its imports are not measured.
        subprocess.run([sys.executable, "-m", __spec__.name, *sys.argv[1:], "--write-only"], check=True)
    if options.ours:
        import vllm_omni_diffusion_compile.offline  # noqa: F401 - importing it registers the plugin
    if options.declared:
        shapes = [f"{width}x{height}" for width, height in _sizes(options.tiny)]
        options.settings["diffusion_compile_config"] = {"warmup": {"shapes": shapes}}
    result = measure(options.checkpoint, options.settings, tiny=options.tiny)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result), flush=True)
    os._exit(0)  # the engine's threads outlive `main`


if __name__ == "__main__":
    main()
