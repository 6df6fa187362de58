"""Which blocks of keys a block of queries attends to.

Queries and keys are pooled to one vector a block; a query block keeps the key blocks whose vectors agree with its own
most, exactly as many as the sparsity leaves, and the protected blocks. Batch and heads choose for themselves.

Shapes below: B batch, N heads, D head size, Q blocks of queries that choose, K blocks of keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_omni_diffusion_compile.rainfusion.geometry import BLOCK, Plan, blocks_of


@dataclass(frozen=True)
class Selection:
    """The key blocks of each query block that chooses.

    Args:
        mask: [B, N, Q, K]: whether a block of keys is kept, bool.
    """

    mask: torch.Tensor

    def lists(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the kept blocks as lists.

        Returns:
            [B, N, Q]: how many are kept; [B, N, Q, K]: their numbers in ascending order, then zeros. Both int32.
        """
        places = self.mask.cumsum(-1, dtype=torch.int32)
        counts = places[..., -1]
        kept = self.mask.shape[-1]
        # Those that are not kept are written to a place of their own behind the list, which is cut off.
        places = torch.where(self.mask, places - 1, kept).to(torch.int64)
        numbers = torch.arange(kept, dtype=torch.int32, device=self.mask.device).expand(places.shape)
        lists = self.mask.new_zeros((*places.shape[:-1], kept + 1), dtype=torch.int32)
        return counts.contiguous(), lists.scatter_(-1, places, numbers)[..., :kept].contiguous()

    def with_protected(self, plan: Plan) -> Selection:
        """Add the protected blocks of queries, which see every key: [B, N, K, K]."""
        behind = plan.layout.blocks - plan.choosing_blocks
        rows = self.mask.new_ones((*self.mask.shape[:2], behind, self.mask.shape[-1]))
        return Selection(torch.cat([self.mask, rows], 2))

    def density(self, plan: Plan) -> float:
        """Return the share of block pairs that is computed, protected queries counted. Waits for the device."""
        choosing = float(self.mask.float().mean()) * plan.choosing_blocks
        return (choosing + plan.layout.blocks - plan.choosing_blocks) / plan.layout.blocks


def pool(rows: torch.Tensor) -> torch.Tensor:
    """Average each block of rows; a ragged last block over the rows it has.

    Args:
        rows: [B, rows, N, D].

    Returns:
        [B, N, blocks, D], fp32.
    """
    count = rows.shape[1]
    whole = count // BLOCK
    parts = [torch.unflatten(rows[:, : whole * BLOCK], 1, (whole, BLOCK)).mean(2, dtype=torch.float32)]
    if whole < blocks_of(count):
        parts.append(rows[:, whole * BLOCK :].mean(1, keepdim=True, dtype=torch.float32))
    return torch.cat(parts, 1).transpose(1, 2)


def select(query: torch.Tensor, key: torch.Tensor, plan: Plan, sparsity: float) -> Selection:
    """Choose the key blocks of every query block that chooses.

    Args:
        query: [B, rows, N, D], in the plan's order of queries; rows beyond those that choose are not read.
        key: [B, rows, N, D], in the plan's order of keys.
        plan: Of the layout.
        sparsity: Share of key blocks to leave out, from 0 up to and including 1.
    """
    # The scale of attention is positive and the same for all keys, and softmax keeps their order: neither changes who
    # is chosen.
    scores = pool(query[:, : plan.choosing_rows]) @ pool(key).transpose(-1, -2)
    chosen = scores.topk(plan.layout.kept_blocks(sparsity), dim=-1, sorted=False).indices
    mask = plan.protected.expand(scores.shape).contiguous()
    return Selection(mask.scatter_(-1, chosen, value=True))
