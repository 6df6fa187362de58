"""`vllm-omni-compile rainfusion`: what a resolution costs block-sparse attention, before anything runs."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm_omni_diffusion_compile.errors import SettingError

if TYPE_CHECKING:
    from vllm_omni_diffusion_compile.rainfusion.geometry import Grid, Layout

HELP = "say which rows of a video RAINFUSION_ATTN leaves out of attention, and what a resolution costs"

# MiniMax-H3: frames a second, pixels to a row of the latent grid, and frames that the VAE takes at once: 17n + 5 of
# them become 5n + 2 in the grid.
_FPS = 24
_PIXELS = 32
_CHUNK, _FIRST, _LATENT_CHUNK, _LATENT_FIRST = 17, 5, 5, 2

_EXPLANATIONS = {
    "video_rows": "rows of the latent grid",
    "residue": "rows that whole blocks of 128 leave over",
    "suffix": "rows outside of the 8x8 tiles, in all frames but the first",
    "promoted": "rows that attend to everything: the suffix, and what makes blocks whole",
    "sparse_rows": "rows that stay selectable",
    "sparse_blocks": "blocks of 128 of these",
    "protected_blocks": "blocks that see everything: first frame, promoted rows, prefix",
    "dense_reason": "why attention stays dense; none if it does not",
    "density_low": "least share of block pairs that is computed",
    "density_high": "largest share: it depends on the video",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("grid", nargs="?", metavar="T,H,W", help="frames, height and width of the latent grid")
    parser.add_argument("--shape", metavar="WxH", help="of a MiniMax-H3 video in pixels, in place of T,H,W")
    parser.add_argument("--seconds", type=float, metavar="S", help=f"length of that video at {_FPS} frames a second")
    parser.add_argument(
        "--prefix", type=int, default=0, metavar="N", help="rows of text, audio and references before it"
    )
    parser.add_argument("--sparsity", type=float, default=0.8, metavar="S", help="0 to 1 (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print it for machines")


def run(options: argparse.Namespace) -> int:
    """Print what the arithmetic says.

    Raises:
        SettingError: The arguments name no grid, or one that cannot be.
    """
    from vllm_omni_diffusion_compile.rainfusion.geometry import Layout

    if options.prefix < 0:
        raise SettingError(f"--prefix is {options.prefix}, expected a number of rows of at least 0")
    if not 0 <= options.sparsity <= 1:
        raise SettingError(f"--sparsity is {options.sparsity}, expected 0 (dense) to 1 (one block is kept)")
    grid = _grid(options)
    facts = describe(Layout.after_prefix(options.prefix, grid), options.sparsity)
    if options.json:
        print(json.dumps(facts, indent=2))
    else:
        _print_table(facts, grid, options)
    return 0


def describe(layout: Layout, sparsity: float) -> dict[str, int | float | str | None]:
    """Return the facts of a layout by the names that the command prints them under."""
    reason = "sparsity is 0" if sparsity == 0 else layout.reason_to_stay_dense()
    low, high = layout.density(sparsity) if reason is None else (1.0, 1.0)
    return {
        "video_rows": layout.video_rows,
        "residue": sum(clip.residue for clip in layout.clips),
        "suffix": sum(clip.suffix for clip in layout.clips),
        "promoted": layout.promoted_rows,
        "sparse_rows": layout.sparse_rows,
        "sparse_blocks": sum(clip.sparse_blocks for clip in layout.clips),
        "protected_blocks": layout.protected_blocks,
        "dense_reason": reason,
        "density_low": low,
        "density_high": high,
    }


def minimax_h3_grid(width: int, height: int, seconds: float) -> Grid:
    """Return the latent grid of a MiniMax-H3 video.

    Args:
        width: In pixels; what exceeds a multiple of 32 is cut off.
        height: As `width`.
        seconds: Its length. The model makes whole chunks of frames: the fewest that are long enough.

    Source: `packed_sequence.py` and `time_request.py` of MiniMax-H3 in vLLM-Omni 0.30.0.
    """
    frames = math.ceil(round(seconds * _FPS, 6))
    chunks = max(0, math.ceil((frames - _FIRST) / _CHUNK))
    return chunks * _LATENT_CHUNK + _LATENT_FIRST, height // _PIXELS, width // _PIXELS


def _grid(options: argparse.Namespace) -> Grid:
    if (options.grid is None) == (options.shape is None):
        raise SettingError(
            "expected either T,H,W, such as 62,24,42, or --shape with --seconds, such as --shape 1344x768 --seconds 8.7"
        )
    if options.grid is not None:
        if options.seconds is not None:
            raise SettingError("--seconds goes with --shape; T,H,W says itself how many frames there are")
        numbers = re.fullmatch(r"(\d+),(\d+),(\d+)", options.grid)
        if numbers is None or "0" in (number.lstrip("0") or "0" for number in numbers.groups()):
            raise SettingError(f"T,H,W is {options.grid!r}, expected three numbers of at least 1, such as 62,24,42")
        frames, height, width = map(int, numbers.groups())
        return frames, height, width
    pixels = re.fullmatch(r"(\d+)x(\d+)", options.shape)
    if pixels is None or min(map(int, pixels.groups())) < _PIXELS:
        raise SettingError(
            f"--shape is {options.shape!r}, expected width and height of at least {_PIXELS} pixels, such as 1344x768"
        )
    if options.seconds is None or not 0 < options.seconds < math.inf:
        raise SettingError(f"--seconds is {options.seconds}, expected how long the video of --shape is, such as 8.7")
    return minimax_h3_grid(int(pixels[1]), int(pixels[2]), options.seconds)


def _print_table(facts: Mapping[str, int | float | str | None], grid: Grid, options: argparse.Namespace) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "what", "value", "meaning", box=box.SIMPLE_HEAD, title_justify="left",
        title=f"latent grid {','.join(map(str, grid))}, {options.prefix} rows before it, sparsity {options.sparsity}",
    )  # fmt: skip
    for name, value in facts.items():
        shown = "none" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
        table.add_row(name, shown, _EXPLANATIONS[name])
    Console().print(table)
