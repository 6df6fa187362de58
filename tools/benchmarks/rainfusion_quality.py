"""How far block-sparse attention is from dense attention on video-like keys: our order against MindIE-SD 3.1.0's.

    python -m tools.benchmarks.rainfusion_quality --json OUT.json

Queries, keys and values are fields that are smooth in space and time plus noise, with unrelated rows of text before
them; a block of queries therefore has most to gain from blocks that are close to it in the video. Both layouts see the
same inputs, choose by the same rule (means of blocks, the same number of blocks for a query block), and attend in fp32:

- ours: the rows outside of the 8x8 tiles are promoted to the protected end of the sequence;
- 3.1.0: they stay at the end of each frame, where the blocks of later tiles are shifted by them, and the last
  ceil(prefix / 128) blocks and those of the first frame are protected, wherever the seam to the prefix lies. Written
  from what its Python does, for one video; nothing of it is copied.

Promotion protects more blocks, and so computes more pairs. For a comparison at equal work there is a third arm:
3.1.0's layout, with as many chosen blocks as make its density at least ours.

Error is the norm of the difference over the norm of dense attention's output, the mean over the seeds; "worst rows" is
the same of the one row in a hundred that is farthest off. Runs on CPU in a few minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from vllm_omni_diffusion_compile.rainfusion.executors.reference import Reference
from vllm_omni_diffusion_compile.rainfusion.geometry import TILE, Grid, Layout, blocks_of, plan
from vllm_omni_diffusion_compile.rainfusion.operation import SparseAttention, dense_sdpa
from vllm_omni_diffusion_compile.rainfusion.selection import Selection, pool

HEADS, SIZE = 2, 64
SCALE = SIZE**-0.5
SPARSITIES = (0.6, 0.8, 0.9)
SEEDS = (0, 1)
# Positions of the grid over which a field changes: a few of them are an object's size.
SMOOTH_OVER = (4, 6, 6)
# Rows before the video, and its grid. The last one is aligned: there both orders have the same tiles.
CASES: tuple[tuple[int, Grid], ...] = (
    (0, (9, 20, 28)), (77, (9, 20, 28)), (128, (13, 18, 26)), (128, (11, 24, 26)), (128, (7, 24, 42)),
    (300, (7, 22, 40)), (0, (6, 30, 44)), (77, (8, 24, 32)),
)  # fmt: skip

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Outcome:
    """What one layout gave at one sparsity.

    Args:
        error: See the top of this module.
        worst_rows: Also.
        density: Share of block pairs that is computed.
    """

    error: float
    worst_rows: float
    density: float


def video_like(layout: Layout, seed: int) -> Inputs:
    """Make query, key and value, each [1, rows, heads, head_dim]: what neighbours share, and noise."""
    generator = torch.Generator().manual_seed(seed)
    (span,) = layout.spans
    rows = slice(span.start, layout.used)
    parts = [torch.randn((1, layout.used, HEADS, SIZE), generator=generator) for _ in range(3)]
    content, values = (_field(span.grid, generator) for _ in range(2))
    for part, field in zip(parts, (content, content, values), strict=True):
        part[0, rows] = 0.5 * part[0, rows] + field
    query, key, value = parts
    return query, key, value


def _field(grid: Grid, generator: torch.Generator) -> torch.Tensor:
    """Return a field of unit variance over a grid: [rows, heads, head_dim]."""
    coarse = [max(2, math.ceil(length / over) + 1) for length, over in zip(grid, SMOOTH_OVER, strict=True)]
    knots = torch.randn((1, HEADS * SIZE, *coarse), generator=generator)
    field = torch.nn.functional.interpolate(knots, grid, mode="trilinear", align_corners=True)
    return (field / field.std()).reshape(HEADS, SIZE, -1).permute(2, 0, 1)


def released_order(grid: Grid) -> torch.Tensor:
    """Return the rows of a video as 3.1.0 puts them, if the grid is no multiple of 8: frame by frame."""
    _, height, width = grid
    whole_height, whole_width = height - height % TILE, width - width % TILE
    index = torch.arange(math.prod(grid)).view(grid)
    parts = [index[0].flatten()]
    for frame in index[1:]:
        tiles = frame[:whole_height, :whole_width].unfold(0, TILE, TILE).unfold(1, TILE, TILE)
        parts += [tiles.flatten(), frame[whole_height:].flatten(), frame[:whole_height, whole_width:].flatten()]
    return torch.cat(parts)


class Released:
    """3.1.0's order and protection.

    Args:
        layout: One video behind a prefix.
    """

    def __init__(self, layout: Layout) -> None:
        (span,) = layout.spans
        self.blocks = layout.blocks
        self._order = torch.cat([span.start + released_order(span.grid), torch.arange(span.start)])
        self._protected = torch.zeros(self.blocks, dtype=torch.bool)
        self._protected[: blocks_of(span.grid[1] * span.grid[2])] = True
        if span.start:
            self._protected[-blocks_of(span.start) :] = True

    def chosen(self, query: torch.Tensor, key: torch.Tensor, count: int) -> Selection:
        """Let every query block choose as many key blocks, and add what is protected."""
        scores = pool(query[:, self._order]) @ pool(key[:, self._order]).transpose(-1, -2)
        mask = (self._protected | self._protected[:, None]).expand(scores.shape).contiguous()
        return Selection(mask.scatter_(-1, scores.topk(count, -1).indices, value=True))

    def attend(self, inputs: Inputs, selection: Selection) -> torch.Tensor:
        """Attend, and put rows back."""
        out = torch.empty_like(inputs[0])
        query, key, value = (part[:, self._order] for part in inputs)
        out[:, self._order] = Reference().attend(query, key, value, selection, SCALE)
        return out

    def at_density(self, query: torch.Tensor, key: torch.Tensor, wanted: float) -> Selection:
        """Choose as few blocks as reach a density."""
        low, high = 1, self.blocks
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if _density(self.chosen(query, key, middle)) >= wanted else (middle + 1, high)
        return self.chosen(query, key, low)


def _density(selection: Selection) -> float:
    return float(selection.mask.float().mean())


def _outcome(out: torch.Tensor, dense: torch.Tensor, density: float) -> Outcome:
    apart, whole = (out - dense).norm(dim=(2, 3)).flatten(), dense.norm(dim=(2, 3)).flatten()
    return Outcome(float(apart.norm() / whole.norm()), float((apart / whole).quantile(0.99)), density)


def compare(layout: Layout, sparsity: float, seed: int) -> dict[str, Outcome]:
    """Return the outcome of each arm."""
    inputs, made, released = video_like(layout, seed), plan(layout, torch.device("cpu")), Released(layout)
    dense = dense_sdpa(*inputs, SCALE)
    seen: list[float] = []
    attention = SparseAttention(sparsity, SCALE, Reference(), lambda q, k, v: dense_sdpa(q, k, v, SCALE))
    ours = _outcome(attention(*inputs, made, lambda chosen: seen.append(chosen.density(made))), dense, 0)
    found = {"ours": Outcome(ours.error, ours.worst_rows, seen[0])}
    selections = {
        "3.1.0": released.chosen(*inputs[:2], layout.kept_blocks(sparsity)),
        "3.1.0 at our density": released.at_density(*inputs[:2], seen[0]),
    }
    return found | {
        name: _outcome(released.attend(inputs, chosen), dense, _density(chosen)) for name, chosen in selections.items()
    }


def mean(outcomes: Sequence[Outcome]) -> Outcome:
    """Average over seeds."""
    columns = zip(*(asdict(outcome).values() for outcome in outcomes), strict=True)
    return Outcome(*(round(statistics.mean(column), 4) for column in columns))


def main() -> None:
    """Measure, print a table, and write a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="OUT.json")
    options = parser.parse_args()
    arms = ("ours", "3.1.0", "3.1.0 at our density")
    table = Table(
        "grid", "prefix", "promoted", "sparsity", *arms, box=box.SIMPLE_HEAD, title_justify="left",
        title="error (worst rows, density)",
    )  # fmt: skip
    told = []
    for prefix, grid in CASES:
        layout = Layout.after_prefix(prefix, grid)
        if layout.reason_to_stay_dense() is not None:
            raise SystemExit(f"{grid} stays dense: {layout.reason_to_stay_dense()}")
        for sparsity in SPARSITIES:
            by_seed = [compare(layout, sparsity, seed) for seed in SEEDS]
            outcomes = {arm: mean([found[arm] for found in by_seed]) for arm in arms}
            told.append(
                {"grid": grid, "prefix": prefix, "promoted": layout.promoted_rows, "sparsity": sparsity}
                | {arm: asdict(outcome) for arm, outcome in outcomes.items()}
            )
            table.add_row(
                ",".join(map(str, grid)), str(prefix), str(layout.promoted_rows), str(sparsity),
                *(f"{out.error:.3f} ({out.worst_rows:.2f}, {out.density:.2f})" for out in outcomes.values()),
            )  # fmt: skip
    Console(width=120).print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
