"""Where the rows of a packed video sequence go, and which blocks of them always attend to everything.

A packed sequence is text, audio and reference rows with one or more videos among them. Attention is computed over
blocks of 128 rows; a block of video pays off only if its rows lie close together in the picture, so rows are regrouped
into tiles of 8x8 positions, two to a block. Nothing is ever padded: rows that fit into no tile, and the few tiles that
would leave the last block ragged, are *promoted* to a segment at the end, where text is too. Blocks of that segment and
of each video's first frame are *protected*: they see every key, and every query sees them.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

BLOCK = 128
TILE = 8
# Below this many blocks of video, choosing blocks costs more than it saves.
MIN_VIDEO_BLOCKS = 32

Grid = tuple[int, int, int]


def blocks_of(rows: int) -> int:
    """Return how many blocks hold that many rows; the last one may be ragged."""
    return -(-rows // BLOCK)


@dataclass(frozen=True)
class Clip:
    """The rows of one video: `frames` x `height` x `width` positions of its latent grid, row by row.

    Args:
        grid: Frames, height and width, each at least 1.

    Raises:
        ValueError: The grid has no rows.
    """

    grid: Grid

    def __post_init__(self) -> None:
        if min(self.grid) < 1:
            raise ValueError(f"found latent grid {self.grid}, expected frames, height and width of at least 1 each")

    @property
    def rows(self) -> int:
        """All its rows."""
        return math.prod(self.grid)

    @property
    def residue(self) -> int:
        """Rows that a whole number of blocks leaves over."""
        return self.rows % BLOCK

    @property
    def suffix(self) -> int:
        """Rows of all frames but the first that lie outside of the 8x8 tiles."""
        frames, height, width = self.grid
        return (frames - 1) * (height * width - (height - height % TILE) * (width - width % TILE))

    @property
    def sparse(self) -> int:
        """Rows that stay selectable: a whole number of blocks."""
        return (self.rows - self.suffix) // BLOCK * BLOCK

    @property
    def promoted(self) -> int:
        """Rows that move to the protected segment: the fewest that hold the suffix and leave whole blocks."""
        return self.rows - self.sparse

    @property
    def sparse_blocks(self) -> int:
        """Blocks of selectable rows."""
        return self.sparse // BLOCK

    @property
    def first_frame_blocks(self) -> int:
        """Selectable blocks that hold rows of the first frame."""
        return min(blocks_of(self.grid[1] * self.grid[2]), self.sparse_blocks)

    def order(self) -> torch.Tensor:
        """Rows in the order of attention: the first frame, the tiles of the others, then what lies outside of them."""
        frames, height, width = self.grid
        tiled_height, tiled_width = height - height % TILE, width - width % TILE
        index = torch.arange(self.rows).view(frames, height, width)
        others = index[1:]
        tiles = others[:, :tiled_height, :tiled_width].reshape(
            frames - 1, tiled_height // TILE, TILE, tiled_width // TILE, TILE
        )
        return torch.cat(
            [
                index[0].flatten(),
                tiles.transpose(2, 3).flatten(),
                # frame by frame: the rows below the tiles, then those to the right of them
                torch.cat([others[:, tiled_height:].flatten(1), others[:, :tiled_height, tiled_width:].flatten(1)], 1)
                .flatten(),
            ]
        )  # fmt: skip


@dataclass(frozen=True)
class Span:
    """One video within a packed sequence.

    Args:
        start: Its first row.
        grid: Frames, height and width of its latent grid.
    """

    start: int
    grid: Grid


@dataclass(frozen=True)
class Layout:
    """What a packed sequence holds, in rows. Two requests of one resolution and one text length have the same one.

    Args:
        used: Rows of the sequence, alignment padding not counted.
        spans: Its videos, in the order of their first rows.

    Raises:
        ValueError: Videos overlap, or do not lie within the sequence.
    """

    used: int
    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        end = 0
        for span in self.spans:
            if span.start < end:
                raise ValueError(
                    f"found a video of grid {span.grid} at row {span.start}, expected row {end} or a later one: "
                    "spans are in the order of their rows, and do not overlap"
                )
            end = span.start + Clip(span.grid).rows
        if end > self.used:
            raise ValueError(f"found videos up to row {end}, expected all within the {self.used} rows of the sequence")

    @classmethod
    def after_prefix(cls, prefix: int, grid: Grid) -> Layout:
        """Describe `[prefix | video]`, which is what most models pack."""
        return cls(prefix + math.prod(grid), (Span(prefix, grid),))

    @property
    def clips(self) -> tuple[Clip, ...]:
        """Its videos, each by itself."""
        return tuple(Clip(span.grid) for span in self.spans)

    @property
    def video_rows(self) -> int:
        """Rows of all videos."""
        return sum(clip.rows for clip in self.clips)

    @property
    def sparse_rows(self) -> int:
        """Selectable rows of all videos."""
        return sum(clip.sparse for clip in self.clips)

    @property
    def promoted_rows(self) -> int:
        """Rows of video that moved to the protected segment."""
        return self.video_rows - self.sparse_rows

    @property
    def blocks(self) -> int:
        """Blocks of the whole sequence; the last one may be ragged."""
        return blocks_of(self.used)

    @property
    def selectable_blocks(self) -> int:
        """Blocks whose queries choose their keys."""
        return sum(clip.sparse_blocks - clip.first_frame_blocks for clip in self.clips)

    @property
    def protected_blocks(self) -> int:
        """Blocks that see every key and that every query sees."""
        return self.blocks - self.selectable_blocks

    def kept_blocks(self, sparsity: float) -> int:
        """Return how many key blocks a query block chooses, protected ones among them or not."""
        return max(1, math.ceil(self.blocks * (1 - sparsity)))

    def density(self, sparsity: float) -> tuple[float, float]:
        """Return the least and the largest share of block pairs that can be computed.

        A query block chooses among all blocks; what it chooses beside the protected ones depends on the content, and
        with it the density between these two.
        """
        chosen, blocks, protected = self.kept_blocks(sparsity), self.blocks, self.protected_blocks
        dense = protected * blocks
        low = dense + self.selectable_blocks * max(chosen, protected)
        high = dense + self.selectable_blocks * min(blocks, chosen + protected)
        return low / blocks**2, high / blocks**2

    def reason_to_stay_dense(self) -> str | None:
        """Say why no choice of blocks pays off for this layout, or None if one may."""
        if not self.spans:
            return "the sequence holds no video"
        if self.video_rows < MIN_VIDEO_BLOCKS * BLOCK:
            return f"{self.video_rows} video rows are fewer than {MIN_VIDEO_BLOCKS} blocks of {BLOCK}"
        if self.selectable_blocks < 1:
            return "no block is left to choose from: first frames and promoted rows hold all of them"
        return None


@dataclass(frozen=True)
class Plan:
    """A layout made concrete on a device.

    Keys and values are put into `key_order`. Queries are put into `query_order`, which has the blocks that choose first
    and the protected ones behind them, so that each kind is one piece.

    Args:
        layout: What it was made from.
        key_order: [rows]: the source row of each row of keys, int64.
        query_order: [rows]: the source row of each row of queries, int64.
        query_inverse: [rows]: where each source row went among the queries, int64.
        query_blocks: [blocks]: for each block of queries, which block of keys holds the same rows, int64.
        protected: [blocks]: whether a block of keys is protected, bool.
        choosing_rows: How many rows of queries, from the first, choose their keys: a whole number of blocks.
    """

    layout: Layout
    key_order: torch.Tensor
    query_order: torch.Tensor
    query_inverse: torch.Tensor
    query_blocks: torch.Tensor
    protected: torch.Tensor
    choosing_rows: int

    @property
    def choosing_blocks(self) -> int:
        """How many blocks of queries choose their keys."""
        return self.choosing_rows // BLOCK

    @property
    def key_inverse(self) -> torch.Tensor:
        """Where each source row went among the keys."""
        return _inverse(self.key_order)


@functools.lru_cache(maxsize=64)
def plan(layout: Layout, device: torch.device) -> Plan:
    """Make a layout concrete, once for each layout and device."""
    orders = [span.start + clip.order() for span, clip in zip(layout.spans, layout.clips, strict=True)]
    outside = torch.ones(layout.used, dtype=torch.bool)
    for order in orders:
        outside[order] = False
    key_order = torch.cat(
        [order[: clip.sparse] for order, clip in zip(orders, layout.clips, strict=True)]
        + [order[clip.sparse :] for order, clip in zip(orders, layout.clips, strict=True)]
        + [outside.nonzero().flatten()]
    )
    protected = torch.ones(layout.blocks, dtype=torch.bool)
    first = 0
    for clip in layout.clips:
        protected[first + clip.first_frame_blocks : first + clip.sparse_blocks] = False
        first += clip.sparse_blocks
    # Choosing blocks first. The ragged block is protected and the last one, so it stays last.
    query_blocks = protected.to(torch.uint8).argsort(stable=True)
    rows = (query_blocks[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
    query_order = key_order[rows[rows < layout.used]]
    return Plan(
        layout=layout,
        key_order=key_order.to(device),
        query_order=query_order.to(device),
        query_inverse=_inverse(query_order).to(device),
        query_blocks=query_blocks.to(device),
        protected=protected.to(device),
        choosing_rows=layout.selectable_blocks * BLOCK,
    )


def _inverse(order: torch.Tensor) -> torch.Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return inverse
