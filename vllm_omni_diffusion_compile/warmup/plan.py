"""The sizes that warmup requests ask for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """Width and height of a request, in pixels."""

    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"


# The size of vLLM-Omni's own dummy run, so that what it compiled is used.
FIRST = Size(512, 512)

# A callable compiled with dynamic=None takes its first size as it is and makes dynamic what differs at the second one:
# so the second size differs in both dimensions. The third shows whether that was enough; it has as many latent rows as
# the second, so a transformer with static shapes is not compiled once more for it. The rest are for models that still
# compiled.
FURTHER = (Size(768, 640), Size(640, 768), Size(896, 512), Size(512, 896))
