"""The one table that the demo prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from tools.demo.arms import FURTHER_REQUESTS, SIZES, Measured

# Where the width is not that of a terminal, wide enough for the longest label and four columns.
_WIDTH = 170


def console() -> Console:
    """Return where the demo prints: colours and boxes on a terminal, plain text elsewhere."""
    output = Console(highlight=False)
    return output if output.is_terminal else Console(width=_WIDTH, highlight=False, no_color=True)


def table(measured: Sequence[Measured], *, plain: bool) -> Table:
    """Lay out the numbers, one column an arm.

    Args:
        measured: The arms in order.
        plain: Draw with ASCII characters only.
    """
    grid = Table(box=box.ASCII if plain else box.SIMPLE_HEAD)
    grid.add_column("", overflow="fold")
    for arm in measured:
        grid.add_column(arm.arm.title, justify="right", overflow="fold")
    for label, value in rows():
        grid.add_row(label, *(value(arm) for arm in measured))
    return grid


def rows() -> list[tuple[str, Callable[[Measured], str]]]:
    """Return the label of each row and how its value is made."""
    return [
        ("flags", lambda arm: " ".join(arm.arm.flags) or "none"),
        ("time to ready, s", lambda arm: f"{arm.ready_s:.1f}"),
        *((f"first request at {size}, s", lambda arm, size=size: f"{arm.first_s[size]:.2f}") for size in SIZES),
        *(
            (f"median of the next {FURTHER_REQUESTS} at {size}, s", lambda arm, size=size: f"{arm.median_s[size]:.2f}")
            for size in SIZES
        ),
        ("compilations before ready, counted by torch", lambda arm: str(arm.compiled.before)),
        ("compilations after ready, counted by torch", lambda arm: str(arm.compiled.after)),
        ("regions compiled, modules in vLLM-Omni's log", lambda arm: str(arm.regions)),
        ("  their distinct functions, counted by torch", lambda arm: str(arm.compiled.transformer_functions)),
        ("VAE decodes compiled, functions counted by torch", lambda arm: str(arm.compiled.vae_functions)),
        ("pictures", lambda arm: "\n".join(str(file) for file in arm.pictures.values())),
    ]
