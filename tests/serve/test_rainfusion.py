"""RAINFUSION_ATTN over HTTP: aligned and misaligned sizes, on a tiny MiniMax-H3 and a tiny Wan2.2."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.serve.server import Server

# Size, aspect ratio, and what the log says of it. The first one's latent grid is a multiple of 8, the other's is not.
H3_SIZES = {
    "512x256": ("16:9", "4096 of 4096 video rows are sparse, 0 are promoted"),
    "384x384": ("1:1", "2048 of 4608 video rows are sparse, 2560 are promoted"),
}
WAN_SIZES = {
    "512x512": "5120 of 5120 video rows are sparse, 0 are promoted",
    "480x528": "3968 of 4950 video rows are sparse, 982 are promoted",
}

pytestmark = [pytest.mark.serve, pytest.mark.timeout(400)]


def _rainfusion(sparsity: float) -> list[str]:
    attention = {"default": {"backend": "RAINFUSION_ATTN", "block_sparse": {"sparsity": sparsity}}}
    return [
        "--diffusion-attention-config", json.dumps(attention),
        # FlexAttention is compared with it elsewhere, and takes half a minute to compile.
        "--diffusion-compile-config.rainfusion_executor", "reference",
    ]  # fmt: skip


def _h3_videos(checkpoint: Path, *options: str, sizes: Iterable[str] = tuple(H3_SIZES)) -> tuple[dict[str, bytes], str]:
    with Server(checkpoint, "--trust-remote-code", "--enforce-eager", *options) as server:
        videos = {
            size: server.videos(
                "a cat", size=size, num_inference_steps=2, seed=1, seconds=4, fps=24,
                extra_params={"aspect_ratio": H3_SIZES[size][0]},
            )
            for size in sizes
        }  # fmt: skip
        return videos, server.log


def test_minimax_h3_is_sparse_at_every_size_and_dense_at_sparsity_0(h3: Path) -> None:
    sparse, log = _h3_videos(h3, *_rainfusion(0.8))
    for _, said in H3_SIZES.values():
        assert said in log
    misaligned = "384x384"
    dense, log = _h3_videos(h3, sizes=[misaligned])
    assert "RAINFUSION_ATTN" not in log
    assert sparse[misaligned] != dense[misaligned], "nothing was left out"
    at_0, log = _h3_videos(h3, *_rainfusion(0.0), sizes=[misaligned])
    assert at_0 == dense
    assert "stays dense: block_sparse.sparsity is 0" in log


def _wan_videos(
    checkpoint: Path, *options: str, sizes: Iterable[str] = tuple(WAN_SIZES)
) -> tuple[dict[str, bytes], str]:
    with Server(checkpoint, "--enforce-eager", *options) as server:
        videos = {
            size: server.videos("a cat", size=size, num_inference_steps=2, seed=1, num_frames=17, fps=16)
            for size in sizes
        }
        return videos, server.log


def test_wan_is_sparse_at_every_size_and_dense_at_sparsity_0(wan: Path, release: tuple[int, int]) -> None:
    if release < (0, 30):
        pytest.skip("Wan2.2 publishes its video's grid from 0.30.0 on")
    sparse, log = _wan_videos(wan, *_rainfusion(0.8))
    for said in WAN_SIZES.values():
        assert said in log
    misaligned = "480x528"
    dense, _ = _wan_videos(wan, sizes=[misaligned])
    assert sparse[misaligned] != dense[misaligned], "nothing was left out"
    at_0, _ = _wan_videos(wan, *_rainfusion(0.0), sizes=[misaligned])
    assert at_0 == dense
