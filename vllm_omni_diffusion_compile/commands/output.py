"""Where tables are printed to."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

# In a file or a pipe there is no terminal to fit; rich would take 80, and break paths and names in the middle.
_PIPED_WIDTH = 120


def console() -> Console:
    """Return a console as wide as the terminal, or as COLUMNS says; in a pipe wide enough for a path."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else _PIPED_WIDTH)
