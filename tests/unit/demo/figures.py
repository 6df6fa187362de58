"""Numbers of two arms, as a run on two cores has them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tools.demo.arms import SIZES, Measured, arms
from tools.demo.trace import Counts

_OURS, _STOCK = arms([], everything=False)

OURS = Measured(
    arm=_OURS,
    ready_s=120.2,
    first_s=dict(zip(SIZES, (0.21, 0.4), strict=True)),
    median_s=dict(zip(SIZES, (0.18, 0.36), strict=True)),
    compiled=Counts(before=8, after=0, transformer_functions=2, vae_functions=1),
    regions=4,
    pictures={size: Path("demo-output", f"ours-{size}.png") for size in SIZES},
)
STOCK = Measured(
    arm=_STOCK,
    ready_s=40.0,
    first_s=dict(zip(SIZES, (11.5, 11.6), strict=True)),
    median_s=dict(zip(SIZES, (0.2, 0.4), strict=True)),
    compiled=Counts(before=2, after=4, transformer_functions=2, vae_functions=0),
    regions=4,
    pictures={size: Path("demo-output", f"stock-{size}.png") for size in SIZES},
)


def with_flags(*flags: str) -> Measured:
    """Our numbers with these flags of the user."""
    return dataclasses.replace(OURS, arm=arms(flags, everything=False)[0])
