"""What is compared: this package and stock vLLM-Omni, with the same model, the same requests and empty caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.demo.trace import Counts
from vllm_omni_diffusion_compile.warmup.plan import FIRST, FURTHER, Size

# Those that the warmup plan comes to first. They are what a user has to ask for to meet warm code in a transformer with
# static shapes, so they are taken from the plan itself.
SIZES: tuple[Size, Size] = (FIRST, FURTHER[0])
# Requests after the first one of each size, of which the table shows the median.
FURTHER_REQUESTS = 5

# Without its platform plugin stock vLLM-Omni does not run on CPU at all; it is separate from the compile features.
_CPU = "diffusion_cpu,vllm_omni_register_models"
STATIC = "--no-diffusion-compile-dynamic"


@dataclass(frozen=True)
class Arm:
    """One server of the comparison.

    Args:
        name: Prefix of its files in the output folder.
        title: Head of its column.
        ours: Whether the compile features of this package are on.
        flags: Passed to `vllm serve`.
    """

    name: str
    title: str
    ours: bool
    flags: tuple[str, ...]

    @property
    def plugins(self) -> str:
        """Value of VLLM_PLUGINS."""
        return f"diffusion_compile,{_CPU}" if self.ours else _CPU


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one arm did.

    Args:
        arm: Which one.
        ready_s: From the start of the process to the first answer of /health.
        first_s: Wall time of the first request of each size.
        median_s: Median wall time of the `FURTHER_REQUESTS` after it.
        compiled: What torch compiled, from its own trace.
        regions: Modules that vLLM-Omni's log says it compiled regionally.
        pictures: The first picture of each size.
    """

    arm: Arm
    ready_s: float
    first_s: dict[Size, float]
    median_s: dict[Size, float]
    compiled: Counts
    regions: int
    pictures: dict[Size, Path]


def arms(flags: Sequence[str], *, everything: bool) -> list[Arm]:
    """List the arms in the order in which they run.

    Ours is the first one: a flag that it refuses is then known after seconds, and what a first start reads from a cold
    disk is not held against stock.

    Args:
        flags: The user's, for our arm; they come last, so that they win.
        everything: Compare dynamic shapes, vLLM-Omni's default, as well.
    """
    pairs = [
        Arm("ours", "with this package", ours=True, flags=(STATIC, *flags)),
        Arm("stock", "stock vLLM-Omni", ours=False, flags=(STATIC,)),
    ]
    if everything:
        pairs += [
            Arm("ours-dynamic", "with this package, dynamic shapes", ours=True, flags=tuple(flags)),
            Arm("stock-dynamic", "stock vLLM-Omni, dynamic shapes", ours=False, flags=()),
        ]
    return pairs
