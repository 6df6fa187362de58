"""Rows for tests."""

from __future__ import annotations

from typing import Any

from vllm_omni_diffusion_compile.evidence import Row, make_row

KEY: dict[str, Any] = {
    "model": "Flux2KleinPipeline",
    "task": "text-to-image",
    "api_mode": "offline",
    "execution_mode": "request",
    "capacity": 1,
    "shape": "128x128",
    "schedule": "FlowMatchEulerDiscreteScheduler, 2 steps",
    "attention_backend": "TORCH_SDPA",
    "packed_layout": "none",
    "cache_policy": "none",
    "quantization": "none",
    "offload": "none",
    "topology": "1 device",
    "hardware": "a machine",
    "dtype": "bfloat16",
    "output_representation": "pixels float32",
    "output_transport": "in process",
    "compiler": "inductor",
    "compile_scope": "regional",
    "dynamic": True,
    "vae_policy": "measure",
    "bucket": None,
}
FIGURES: tuple[dict[str, Any], ...] = tuple(
    {"seen": seen, "name": name, "measure": "largest difference from eager, of its scale", "value": 1e-6, "bound": 1e-4}
    for seen, name in (("component", "transformer"), ("latents", "step 1"), ("artefact", "picture"))
)
TRACE: dict[str, Any] = {
    "attention": {"SDPAImpl": 8},
    "operators": {"aten::_scaled_dot_product_flash_attention_for_cpu": 8},
    "compiled_calls": 8,
    "decode_compiled_calls": 0,
    "compiled_graphs": 2,
    "fallbacks": 0,
}
PROVENANCE: dict[str, Any] = {
    "checkpoint": "klein",
    "checkpoint_revision": "a hash",
    "vllm_omni": "0.30.0",
    "version": "0.1.0",
    "torch": "2.13.0",
    "command": "vllm-omni-compile qualify --row rows.jsonl#klein",
    "settings": {"diffusion_compile_granularity": "regional"},
    "oracle": {"enforce_eager": True},
    "request": {"prompt": "a cat", "width": 128, "height": 128},
    "assets": {},
    "seed": 1,
    "artefacts": {"klein/picture.npz": "0" * 64},
    "environment": {"python": "3.11.0"},
    "measured_on": "2026-01-01",
}


def validated(**key: Any) -> Row:
    """A validated row; `key` replaces fields of its key, and `id` its name."""
    name = key.pop("id", "klein")
    return make_row(name, KEY | key, "validated", figures=FIGURES, trace=TRACE, provenance=PROVENANCE)
