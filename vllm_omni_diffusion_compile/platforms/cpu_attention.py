"""Dense attention on CPU: vLLM-Omni's own SDPA backend, reached on an out-of-tree platform."""

from __future__ import annotations

import torch
from vllm_omni.diffusion.attention.backends.abstract import AttentionMetadata
from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl


class CpuSDPAImpl(SDPAImpl):  # type: ignore[misc]
    """SDPA whose `forward` does not ask which accelerator there is.

    vLLM-Omni's dispatch knows its built-in platforms and raises NotImplementedError for any other, CPU included. What
    it calls for CUDA is `scaled_dot_product_attention` and nothing else.
    """

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_metadata: AttentionMetadata | None = None,
    ) -> torch.Tensor:
        """Attend densely.

        Args:
            query: [batch, rows, heads, head_dim].
            key: [batch, key rows, key heads, head_dim].
            value: As `key`.
            attn_metadata: Its mask, [batch, key rows], or None.
        """
        out: torch.Tensor = self.forward_cuda(query, key, value, attn_metadata)
        return out


class CpuSDPABackend(SDPABackend):  # type: ignore[misc]
    """vLLM-Omni's SDPA backend with `CpuSDPAImpl` as its implementation."""

    @staticmethod
    def get_impl_cls() -> type[CpuSDPAImpl]:
        return CpuSDPAImpl
