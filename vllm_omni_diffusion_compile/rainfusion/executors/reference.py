"""Masked dense attention in fp32: what the other executors are measured by."""

from __future__ import annotations

import torch

from vllm_omni_diffusion_compile.rainfusion.geometry import BLOCK, blocks_of
from vllm_omni_diffusion_compile.rainfusion.selection import Selection

# Scores held at a time, all batches and heads counted: 256 MB in fp32.
_SCORES = 1 << 26


class Reference:
    """Computes every score and masks those that are not chosen: slow, and right on every device."""

    name = "reference"
    takes_a_part = True

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, selection: Selection, scale: float
    ) -> torch.Tensor:
        """See `Executor.attend`."""
        rows = key.shape[1]
        keys, values = key.transpose(1, 2).float(), value.transpose(1, 2).float()
        batch, _, heads, _ = query.shape
        step = max(1, _SCORES // (batch * heads * BLOCK * rows)) * BLOCK
        parts = []
        for first in range(0, query.shape[1], step):
            part = query[:, first : first + step].transpose(1, 2).float()
            # One row a block of queries, one column a key: as many rows as `step` has blocks.
            chosen = selection.mask[:, :, first // BLOCK : blocks_of(first + part.shape[2])]
            chosen = chosen.repeat_interleave(BLOCK, -1)[..., :rows].repeat_interleave(BLOCK, -2)[:, :, : part.shape[2]]
            scores = (part @ keys.transpose(-1, -2)).mul_(scale).masked_fill_(~chosen, float("-inf"))
            parts.append((scores.softmax(-1) @ values).transpose(1, 2))
        return torch.cat(parts, 1).to(query.dtype)
