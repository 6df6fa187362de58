"""The whole operation: order rows, choose blocks, attend, put rows back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_omni_diffusion_compile.rainfusion.executors.interface import Executor
from vllm_omni_diffusion_compile.rainfusion.geometry import Plan
from vllm_omni_diffusion_compile.rainfusion.selection import Selection, select

# Query, key and value, [batch, rows, heads, head_dim] each, to attention of every query over every key.
Dense = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class SparseAttention:
    """Attention to what a plan protects and to what each block of queries chooses.

    Args:
        sparsity: Share of key blocks that a block of queries leaves out, from 0 up to and including 1.
        scale: Of the scores.
        executor: Computes the blocks of queries that choose.
        dense: Computes the protected ones, if the executor takes a part.
    """

    sparsity: float
    scale: float
    executor: Executor
    dense: Dense

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: Plan,
        observe: Callable[[Selection], None] | None = None,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: [batch, rows, heads, head_dim], as many rows as the plan's layout uses.
            key: As `query`.
            value: As `query`.
            plan: Of the layout, on the device of the tensors.
            observe: Told what was chosen, once attention to it is under way.

        Returns:
            As `query`.
        """
        ordered = query.index_select(1, plan.query_order)
        key, value = key.index_select(1, plan.key_order), value.index_select(1, plan.key_order)
        selection = select(ordered, key, plan, self.sparsity)
        if self.executor.takes_a_part:
            choosing = plan.choosing_rows
            parts = [self.executor.attend(ordered[:, :choosing], key, value, selection, self.scale)]
            if choosing < ordered.shape[1]:
                parts.append(self.dense(ordered[:, choosing:], key, value))
            out = torch.cat(parts, 1)
        else:
            out = self.executor.attend(ordered, key, value, selection.with_protected(plan), self.scale)
        if observe is not None:
            observe(selection)
        return out.index_select(1, plan.query_inverse)


def dense_sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Attend densely with torch's own attention: where no backend of the platform is at hand."""
    out = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), scale=scale
    )
    return out.transpose(1, 2)
