import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni_diffusion_compile.rainfusion.geometry import BLOCK, Layout, Plan, plan
from vllm_omni_diffusion_compile.rainfusion.selection import Selection, pool, select

CPU = torch.device("cpu")


def _ordered(made: Plan, *, heads: int = 2, batch: int = 1, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    query, key = (torch.randn(batch, made.layout.used, heads, size) for _ in range(2))
    return query[:, made.query_order], key[:, made.key_order]


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from([(5, 16, 16), (4, 21, 32), (9, 24, 10), (3, 20, 24)]), st.integers(0, 1023),
    st.sampled_from([0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.999, 1.0]),
)  # fmt: skip
def test_as_many_blocks_are_kept_as_the_sparsity_leaves_and_the_protected_ones(
    grid: tuple[int, int, int], prefix: int, sparsity: float
) -> None:
    made = plan(Layout.after_prefix(prefix, grid), CPU)
    query, key = _ordered(made)
    mask = select(query, key, made, sparsity).mask
    blocks = math.ceil((prefix + math.prod(grid)) / BLOCK)
    chosen = max(1, math.ceil(blocks * (1 - sparsity)))
    protected = int(made.protected.sum())
    assert mask.shape == (1, 2, made.choosing_blocks, blocks)
    assert mask[..., made.protected].all()
    assert int(mask.sum(-1).min()) >= max(chosen, protected)
    assert int(mask.sum(-1).max()) <= min(blocks, chosen + protected)
    # The chosen ones are those whose averages agree most; a tie would be broken somehow, and has no tie here.
    rank = (pool(query)[:, :, : made.choosing_blocks] @ pool(key).mT).argsort(-1, descending=True).argsort(-1)
    assert torch.equal(mask, (rank < chosen) | made.protected)


def test_equal_blocks_are_not_all_kept() -> None:
    made = plan(Layout.after_prefix(0, (9, 32, 32)), CPU)
    same = torch.ones(1, made.layout.used, 1, 8)
    kept = select(same, same, made, 0.9).mask.sum(-1)
    assert int(kept.max()) <= made.layout.kept_blocks(0.9) + made.layout.protected_blocks


def test_every_batch_and_head_chooses_for_itself() -> None:
    made = plan(Layout.after_prefix(100, (6, 24, 24)), CPU)
    query, key = _ordered(made, heads=3, batch=2)
    mask = select(query, key, made, 0.8).mask
    for batch in range(2):
        for head in range(3):
            alone = select(query[batch, None, :, head, None], key[batch, None, :, head, None], made, 0.8).mask
            assert torch.equal(mask[batch, head], alone[0, 0])
    assert not torch.equal(mask[0], mask[1])
    assert not torch.equal(mask[0, 0], mask[0, 1])


def test_a_ragged_last_block_is_averaged_over_the_rows_it_has() -> None:
    rows = torch.randn(1, 2 * BLOCK + 5, 3, 8)
    assert torch.allclose(pool(rows)[0, :, 2], rows[0, 2 * BLOCK :].mean(0), atol=1e-6)
    assert torch.allclose(pool(rows)[0, :, 1], rows[0, BLOCK : 2 * BLOCK].mean(0), atol=1e-6)


def test_bf16_rows_are_averaged_and_compared_in_fp32() -> None:
    made = plan(Layout.after_prefix(3, (5, 16, 16)), CPU)
    query, key = (part.bfloat16() for part in _ordered(made))
    assert pool(key).dtype == torch.float32
    assert torch.equal(select(query, key, made, 0.5).mask, select(query.float(), key.float(), made, 0.5).mask)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_lists_name_the_kept_blocks_in_order(share: float) -> None:
    torch.manual_seed(1)
    mask = torch.rand(2, 3, 7, 50) < share
    counts, lists = Selection(mask).lists()
    assert counts.dtype == lists.dtype == torch.int32
    for place in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(7)).tolist():
        batch, head, block = place
        kept = mask[batch, head, block].nonzero().flatten()
        assert torch.equal(lists[batch, head, block, : counts[batch, head, block]], kept.int())
    assert int(lists.max()) < 50 and int(lists.min()) >= 0
