"""Whether choosing blocks pays off, from what is known before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vllm_omni_diffusion_compile.rainfusion.geometry import Layout

# Sparse attention has to promise this much of the dense time or less.
_AT_MOST = 0.95


@dataclass(frozen=True)
class Cost:
    """What an executor costs, in units of the fastest dense attention on the same GPU.

    Args:
        pair: Of a pair of rows, against one of dense attention.
        row: Of ordering, pooling and putting back a row, as so many pairs.
        call: Of starting it all, as so many pairs of a head of size 1.
    """

    pair: float
    row: float
    call: float


# Measured on an H200 in bf16 with 8 heads of 128 against FlashAttention-3 (docs/rainfusion.md): a pair and a row on
# 62,24,42 behind 710 rows, a call on 4,16,64, where launching kernels is nearly all of it. The test of this module
# holds them against every grid that was measured.
_COSTS: Mapping[str, Cost] = {
    "flash": Cost(pair=1.1, row=2000, call=8e10),
    "flex": Cost(pair=2.05, row=2000, call=8e10),
}


def share_of_dense(layout: Layout, sparsity: float, executor: str, width: int) -> float | None:
    """Return the time of the sparse operation as a share of the dense one's, at the largest density there can be.

    Args:
        layout: Of the sequence.
        sparsity: Share of key blocks that are left out.
        executor: Its name.
        width: Heads times head size.

    Returns:
        The share; None for an executor that was not measured.
    """
    cost = _COSTS.get(executor)
    if cost is None:
        return None
    _, density = layout.density(sparsity)
    protected = layout.protected_blocks / layout.blocks
    return protected + (density - protected) * cost.pair + cost.row / layout.used + cost.call / (layout.used**2 * width)


def reason_not_worth_it(layout: Layout, sparsity: float, executor: str, width: int) -> str | None:
    """Say why dense attention is expected to be faster, or None; arguments as `share_of_dense`."""
    share = share_of_dense(layout, sparsity, executor, width)
    if share is None or share <= _AT_MOST:
        return None
    protected, (_, density) = layout.protected_blocks, layout.density(sparsity)
    return (
        f"{protected} of {layout.blocks} blocks are protected and up to {density:.0%} of all block pairs are computed, "
        f"which is expected to take {share:.2f} of the dense time with the executor '{executor}'"
    )
