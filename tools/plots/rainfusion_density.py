"""How much of attention RAINFUSION_ATTN computes at a sparsity, for the sizes that MiniMax-H3 and Wan2.2 are asked for.

    python -m tools.plots.rainfusion_density docs/images/rainfusion-density.png

Each band lies between the least and the largest share of block pairs that the video can lead to. Bands of a colour are
of one model; what is dashed is a grid that is no multiple of 8.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from matplotlib.figure import Figure

from vllm_omni_diffusion_compile.rainfusion.geometry import Grid, Layout

# Rows of text, audio and references before a MiniMax-H3 video: a prompt of some sentences.
H3_PREFIX = 710
SIZES: tuple[tuple[str, int, Grid, str], ...] = (
    ("MiniMax-H3 672x384, 8.7 s", H3_PREFIX, (62, 12, 21), "#9ecae1"),
    ("MiniMax-H3 1344x768, 5.1 s", H3_PREFIX, (37, 24, 42), "#6baed6"),
    ("MiniMax-H3 1344x768, 8.7 s", H3_PREFIX, (62, 24, 42), "#3182bd"),
    ("MiniMax-H3 1280x768, 8.7 s", H3_PREFIX, (62, 24, 40), "#08306b"),
    ("Wan2.2 832x480, 81 frames", 0, (21, 30, 52), "#fdae6b"),
    ("Wan2.2 1280x720, 81 frames", 0, (21, 45, 80), "#e6550d"),
    ("Wan2.2 896x512, 81 frames", 0, (21, 32, 56), "#7f2704"),
)
STEPS = 200


def draw(out: Path) -> None:
    """Draw the plot of all sizes."""
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    sparsities = [step / STEPS for step in range(1, STEPS + 1)]
    axes.plot([0, 1], [1, 0], color="0.6", linewidth=1, label="what the sparsity alone says")
    for name, prefix, grid, color in SIZES:
        layout = Layout.after_prefix(prefix, grid)
        low, high = zip(*(layout.density(sparsity) for sparsity in sparsities), strict=True)
        promoted = layout.promoted_rows / layout.video_rows
        axes.fill_between(sparsities, low, high, color=color, alpha=0.3, linewidth=0)
        axes.plot(
            sparsities, high, color=color, linestyle="--" if promoted else "-",
            label=f"{name} ({','.join(map(str, grid))}): {promoted:.0%} of its rows promoted",
        )  # fmt: skip
    axes.set(
        xlabel="block_sparse.sparsity", ylabel="share of block pairs that is computed", xlim=(0, 1), ylim=(0, 1.02),
        title="Density against sparsity",
    )  # fmt: skip
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left", fontsize="small")
    figure.savefig(out, dpi=110, metadata={"Software": None})


def main() -> None:
    """Draw into the file that is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.png")
    draw(parser.parse_args().out)


if __name__ == "__main__":
    main()
