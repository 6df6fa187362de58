"""A stand-in for the entry of MindIE-SD's kernel: runs on CPU, reads its arguments as 3.1.0's wrapper hands them."""

from __future__ import annotations

import torch


def rain_fusion_attention(  # noqa: PLR0913, PLR0917 - the signature is MindIE-SD's
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None = None,
    head_num: int | None = None,
    input_layout: str = "TND",
    select_idx: torch.Tensor | None = None,
    select_num_idx: torch.Tensor | None = None,
    blockshape: list[int] | None = None,
    actual_seq_lengths: list[int] | None = None,
    actual_seq_lengths_kv: list[int] | None = None,
    inner_precise: int = 0,
) -> torch.Tensor:
    """Attend: `[rows, heads, head_dim]` in TND, lists `[query blocks, heads, key blocks]` that end with -1."""
    assert input_layout == "TND"
    assert scale is not None and select_idx is not None and select_num_idx is not None
    assert blockshape == [128, 128] and inner_precise in (0, 1)
    rows, heads, _ = query.shape
    assert head_num == heads
    assert actual_seq_lengths == [rows] and actual_seq_lengths_kv == [key.shape[0]]
    blocks = -(-rows // 128)
    assert select_idx.shape == (blocks, heads, -(-key.shape[0] // 128))
    assert select_num_idx.shape == (blocks, heads)
    assert select_idx.dtype == select_num_idx.dtype == torch.int64
    out = torch.empty_like(query)
    for block in range(blocks):
        for head in range(heads):
            count = int(select_num_idx[block, head])
            assert (select_idx[block, head, count:] == -1).all()
            chosen = select_idx[block, head, :count]
            assert (chosen >= 0).all() and (chosen.diff() > 0).all()
            seen = (chosen[:, None] * 128 + torch.arange(128)).flatten()
            seen = seen[seen < key.shape[0]]
            part = slice(block * 128, block * 128 + 128)
            scores = query[part, head].float() @ key[seen, head].float().T * scale
            out[part, head] = (scores.softmax(-1) @ value[seen, head].float()).to(query.dtype)
    return out
