import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from vllm_omni_diffusion_compile.rainfusion.geometry import BLOCK, Clip, Grid, Layout, Plan, Span, plan

CPU = torch.device("cpu")
GRIDS = st.tuples(st.integers(1, 9), st.integers(1, 40), st.integers(1, 40))
PREFIXES = st.integers(0, 1023)


# Rows: video, residue, suffix, promoted, sparse, blocks. The second one is published by the upstream project.
@pytest.mark.parametrize(
    ("grid", "facts"),
    [
        ((62, 24, 40), (59520, 0, 0, 0, 59520, 465)),
        ((62, 24, 42), (62496, 32, 2928, 2976, 59520, 465)),
        ((64, 24, 42), (64512, 0, 3024, 3072, 61440, 480)),
        ((21, 45, 80), (75600, 80, 8000, 8016, 67584, 528)),
        ((21, 30, 52), (32760, 120, 8160, 8184, 24576, 192)),
        ((31, 22, 40), (27280, 16, 7200, 7312, 19968, 156)),
        ((4, 16, 64), (4096, 0, 0, 0, 4096, 32)),
        ((4, 16, 10), (640, 0, 96, 128, 512, 4)),
        ((62, 4, 42), (10416, 48, 10248, 10288, 128, 1)),
        ((3, 3, 3), (27, 27, 18, 27, 0, 0)),
    ],
)
def test_rows_of_the_usual_grids(grid: Grid, facts: tuple[int, ...]) -> None:
    clip = Clip(grid)
    assert (clip.rows, clip.residue, clip.suffix, clip.promoted, clip.sparse, clip.sparse_blocks) == facts


@given(GRIDS)
def test_what_is_promoted_is_the_least_that_holds_the_suffix_and_leaves_whole_blocks(grid: Grid) -> None:
    clip = Clip(grid)
    assert clip.sparse % BLOCK == 0
    assert clip.suffix <= clip.promoted < clip.suffix + BLOCK
    assert clip.promoted + clip.sparse == clip.rows == math.prod(grid)


@settings(deadline=None)
@given(GRIDS, PREFIXES)
def test_a_block_of_the_tiled_part_is_a_patch_of_one_frame_or_of_two(grid: Grid, prefix: int) -> None:
    made = plan(Layout.after_prefix(prefix, grid), CPU)
    frames, height, width = grid
    tiled = range(height * width, Clip(grid).sparse)
    source = made.key_order[tiled.start : tiled.stop] - prefix
    # Every 64 rows from the end of the first frame on are one tile: 8 rows of 8 neighbours within one frame.
    whole = source[: source.numel() // 64 * 64].view(-1, 8, 8)
    assert torch.equal(whole, whole[:, :1, :1] + torch.arange(8)[:, None] * width + torch.arange(8))
    assert (whole[:, 0, 0] // (height * width) == whole[:, 7, 7] // (height * width)).all()
    assert frames == 1 or whole.numel() == 0 or whole.min() >= height * width


@settings(deadline=None)
@given(GRIDS, PREFIXES)
def test_every_row_goes_somewhere_and_comes_back(grid: Grid, prefix: int) -> None:
    _comes_back(plan(Layout.after_prefix(prefix, grid), CPU))


@settings(deadline=None)
@given(st.lists(st.tuples(GRIDS, PREFIXES), min_size=1, max_size=4), PREFIXES)
def test_several_videos_come_back_too_and_no_block_mixes_two(parts: list[tuple[Grid, int]], behind: int) -> None:
    spans, rows = [], 0
    for grid, before in parts:
        spans.append(Span(rows + before, grid))
        rows += before + math.prod(grid)
    layout = Layout(rows + behind, tuple(spans))
    made = plan(layout, CPU)
    _comes_back(made)
    owner = torch.full((layout.used,), -1)
    for number, span in enumerate(spans):
        owner[span.start : span.start + math.prod(span.grid)] = number
    sparse = owner[made.key_order[: layout.sparse_rows]].view(-1, BLOCK)
    assert (sparse == sparse[:, :1]).all()
    assert (sparse >= 0).all()
    assert layout.promoted_rows == sum(Clip(span.grid).promoted for span in spans)
    assert made.protected[layout.sparse_rows // BLOCK :].all()


def _comes_back(made: Plan) -> None:
    rows = torch.arange(made.layout.used)
    assert torch.equal(rows[made.query_order][made.query_inverse], rows)
    assert torch.equal(rows[made.key_order][made.key_inverse], rows)
    assert torch.equal(made.key_order.sort().values, rows)


@settings(deadline=None)
@given(GRIDS, PREFIXES)
def test_first_frame_prefix_and_what_is_outside_of_tiles_are_protected(grid: Grid, prefix: int) -> None:
    frames, height, width = grid
    made = plan(Layout.after_prefix(prefix, grid), CPU)
    row_is_protected = made.protected.repeat_interleave(BLOCK)[: made.layout.used][made.key_inverse]
    outside = torch.ones(frames, height, width, dtype=torch.bool)
    outside[1:, : height - height % 8, : width - width % 8] = False
    assert row_is_protected[:prefix].all()
    assert row_is_protected[prefix:][outside.flatten()].all()
    # and no more than that, but for what makes blocks whole
    surplus = int(row_is_protected.sum()) - prefix - int(outside.sum())
    assert surplus < 2 * BLOCK or made.layout.sparse_rows == 0
    assert int(made.protected.sum()) == made.layout.protected_blocks


@settings(deadline=None)
@given(GRIDS, PREFIXES)
def test_queries_that_choose_are_whole_blocks_before_the_protected_ones(grid: Grid, prefix: int) -> None:
    made = plan(Layout.after_prefix(prefix, grid), CPU)
    assert not made.protected[made.query_blocks[: made.choosing_blocks]].any()
    assert made.protected[made.query_blocks[made.choosing_blocks :]].all()
    for place, block in enumerate(made.query_blocks.tolist()[: made.choosing_blocks]):
        assert torch.equal(
            made.query_order[place * BLOCK :][:BLOCK], made.key_order[block * BLOCK : block * BLOCK + BLOCK]
        )


def test_a_plan_is_made_once_for_a_layout() -> None:
    assert plan(Layout.after_prefix(7, (3, 16, 16)), CPU) is plan(Layout.after_prefix(7, (3, 16, 16)), CPU)


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (Layout.after_prefix(710, (62, 24, 42)), None),
        (Layout.after_prefix(0, (4, 16, 64)), None),
        (Layout.after_prefix(0, (4, 16, 10)), "640 video rows are fewer than 32 blocks"),
        (Layout.after_prefix(5000, (3, 3, 3)), "27 video rows"),
        (Layout.after_prefix(0, (62, 4, 42)), "no block is left to choose from"),
        (Layout.after_prefix(0, (1, 64, 72)), "no block is left to choose from"),
        (Layout(400, ()), "no video"),
        # one clip alone would be too short, both together are not
        (Layout(4608, (Span(0, (9, 16, 16)), Span(2304, (9, 16, 16)))), None),
    ],
)
def test_reason_to_stay_dense(layout: Layout, reason: str | None) -> None:
    found = layout.reason_to_stay_dense()
    assert found is None if reason is None else found is not None and reason in found


@given(GRIDS, PREFIXES, st.floats(0, 1))
def test_density_lies_between_what_is_protected_and_everything(grid: Grid, prefix: int, sparsity: float) -> None:
    layout = Layout.after_prefix(prefix, grid)
    assume(layout.selectable_blocks)
    low, high = layout.density(sparsity)
    assert 0 < low <= high <= 1
    assert layout.density(0.0) == (1, 1)


@pytest.mark.parametrize(
    ("rows", "spans", "message"),
    [
        (100, [Span(0, (3, 5, 5)), Span(74, (1, 5, 5))], "row 75"),
        (100, [Span(30, (3, 5, 5))], "up to row 105"),
    ],
)
def test_videos_that_cannot_lie_so_are_refused(rows: int, spans: list[Span], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(rows, tuple(spans))


def test_a_grid_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Clip((3, 0, 4))
