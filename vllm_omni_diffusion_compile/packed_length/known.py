"""What is known of a request's rows before its prompt is tokenized and its media are decoded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_omni_diffusion_compile.packed_length.rows import FPS, Shape, frame_rows

# A reference image is scaled until its short side has 2048 pixels: it takes no fewer rows than a square of them.
_LEAST_REFERENCE_ROWS = frame_rows(2048, 2048)
# Of the canvas that a named ratio stands for.
_SHORT_EDGE = 768
_MOST_PIXELS = 768 * 1344
_RATIOS: Mapping[str, float] = {
    "21:9": 21 / 9,
    "16:9": 16 / 9,
    "4:3": 4 / 3,
    "1:1": 1.0,
    "3:4": 3 / 4,
    "9:16": 9 / 16,
}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a request asks for, as it came in.

    Args:
        extra: Its `extra_args`.
        width: In pixels; None if it does not say, and anything else is the host's to refuse.
        height: The same.
        frames: The same, in frames; `duration` in `extra` wins over it.
        images: That it brings: keyframes or references, each of which takes rows of its own.
        media: Whether it brings video or audio references.
    """

    extra: Mapping[str, Any] = field(default_factory=dict)
    width: object = None
    height: object = None
    frames: object = None
    images: int = 0
    media: bool = False

    @property
    def least_rows(self) -> int:
        """The rows that it has at least: those of its video and sound, and of the images that it brings.

        What cannot be made sense of counts as nothing.
        """
        target = self.extra.get("target")
        stated = target if isinstance(target, Mapping) else {}
        size = _size(self.width, self.height, stated.get("aspect_ratio", self.extra.get("aspect_ratio")))
        if size is None or min(size) < 32:
            return 0
        duration = self.extra.get("duration_seconds", self.extra.get("duration"))
        frames = _frames(stated.get("duration_seconds", duration), self.frames)
        task = self.extra.get("task")
        # Images without a task are keyframes or references: only the checkpoint knows, and the default length of a
        # request with references is the shorter one.
        references = self.media or (self.images > 0 and task is None) or str(task).lower() == "ref2va"
        shape = Shape(task="ref2va" if references else "t2va", width=size[0], height=size[1], frames=frames)
        return shape.used_rows + self.images * min(frame_rows(*size), _LEAST_REFERENCE_ROWS)


def _size(width: object, height: object, ratio: object) -> tuple[int, int] | None:
    if _is_whole(width) and _is_whole(height):
        return int(width), int(height)  # type: ignore[call-overload]
    named = _RATIOS.get(ratio.strip().lower()) if isinstance(ratio, str) else None
    return None if named is None else _canvas(named)


def _canvas(ratio: float) -> tuple[int, int]:
    """Return the size that a ratio stands for.

    Source: `resolve_minimax_h3_output_canvas` of model_executor/models/minimax_h3/preprocessing.py, 0.30.0.
    """
    width, height = _SHORT_EDGE * max(ratio, 1.0), _SHORT_EDGE / min(ratio, 1.0)
    scale = min(1.0, math.sqrt(_MOST_PIXELS / (width * height)))
    return _rounded(width * scale), _rounded(height * scale)


def _rounded(pixels: float) -> int:
    return max(32, round(pixels / 32) * 32)


def _frames(duration: object, frames: object) -> int | None:
    if isinstance(duration, str):
        try:
            duration = float(duration)
        except ValueError:
            return 1
    if isinstance(duration, (int, float)) and not isinstance(duration, bool):
        # What is no length, or not one that is served, the host refuses.
        return round(duration * FPS) if math.isfinite(duration) and 0 < duration < 1000 else 1
    if duration is not None:
        return 1
    return int(frames) if _is_whole(frames) and int(frames) > 1 else None  # type: ignore[call-overload]


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 20
