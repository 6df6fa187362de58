"""RAINFUSION_ATTN on every platform, with an order and a choice of blocks that are ours."""

from __future__ import annotations


def run_everywhere(backend: type) -> type:
    """Derive a backend from vLLM-Omni's that runs on CUDA, CPU and NPU."""
    from vllm_omni_diffusion_compile.upstream import sparse_attention

    return sparse_attention.derive(backend)
