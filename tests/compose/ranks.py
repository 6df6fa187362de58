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
