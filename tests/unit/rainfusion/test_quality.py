"""How far tail promotion is from dense attention, on video-like inputs: see tools/benchmarks/rainfusion_quality.py."""

import math

import pytest
import torch

from tools.benchmarks.rainfusion_quality import compare, released_order
from vllm_omni_diffusion_compile.rainfusion.geometry import Layout


def test_promoted_tails_are_nearer_to_dense_than_tails_within_frames() -> None:
    found = compare(Layout.after_prefix(128, (7, 24, 42)), 0.8, seed=0)
    ours, released = found["ours"], found["3.1.0"]
    assert ours.error < released.error and ours.worst_rows < released.worst_rows


def test_an_aligned_grid_is_the_same_in_both() -> None:
    found = compare(Layout.after_prefix(0, (8, 24, 32)), 0.8, seed=0)
    assert found["ours"].error == pytest.approx(found["3.1.0"].error, rel=1e-4)
    assert found["ours"].density == pytest.approx(found["3.1.0"].density)


def test_the_release_leaves_what_is_outside_of_the_tiles_at_the_end_of_each_frame() -> None:
    grid = (3, 10, 11)
    order = released_order(grid)
    assert order.sort().values.equal(torch.arange(math.prod(grid)))
    frame = order[110:220] - 110
    rows, columns = frame // 11, frame % 11
    assert ((rows < 8) & (columns < 8)).tolist() == [True] * 64 + [False] * 46
    assert frame[64] == 88 and frame[86] == 8  # the rows below, then those to the right
