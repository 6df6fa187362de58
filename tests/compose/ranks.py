"""What a worker is asked for on every rank, where vLLM-Omni lets only the first one answer."""

from __future__ import annotations

from typing import Any


class RankFacts:
    """A worker extension (`worker_extension_cls`) whose answer holds those of all ranks."""

    def all_compile_facts(self) -> list[dict[str, Any]]:
        """`diffusion_compile_facts` of each rank."""
        import torch.distributed as dist

        facts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(facts, self.diffusion_compile_facts())  # type: ignore[attr-defined]
        return facts


class PredictedRows:
    """A worker extension that computes MiniMax-H3's transformer in fp32 and keeps what it made last."""

    def compute_in_fp32(self) -> None:
        """As it says, on every rank."""
        import torch
        from vllm_omni.diffusion.models.minimax_h3 import minimax_h3_transformer

        minimax_h3_transformer._BF16_DTYPE = torch.float32  # the model casts by a constant of its module
        transformer = self.model_runner.pipeline.transformer.float()  # type: ignore[attr-defined]
        transformer.register_forward_hook(self._keep)

    def _keep(self, _: Any, inputs: Any, output: Any) -> None:
        import torch

        self._rows = torch.cat([rows.float().flatten() for rows in output])

    def last_rows(self) -> list[float]:
        """Rows of video and sound of the last forward, on the first rank."""
        return list(map(float, self._rows))
