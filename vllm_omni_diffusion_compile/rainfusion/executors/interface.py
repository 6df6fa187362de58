"""The interface of executors."""

from __future__ import annotations

from typing import Protocol

import torch

from vllm_omni_diffusion_compile.rainfusion.selection import Selection


class Executor(Protocol):
    """Computes attention in which every block of queries sees some blocks of keys."""

    name: str
    # Whether it takes the blocks of queries that choose by themselves, so that a dense backend computes the protected
    # ones; else it is given all of them.
    takes_a_part: bool

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, selection: Selection, scale: float
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: [batch, query rows, heads, head_dim]; blocks of 128 rows, as many as the selection has.
            key: [batch, rows, heads, head_dim]; its last block may be ragged.
            value: As `key`.
            selection: Which blocks of keys each block of queries sees. All see the last one.
            scale: Of the scores.

        Returns:
            As `query`.
        """
