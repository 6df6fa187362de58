"""The requests that have each bucket compiled before users need it.

A pinned length is compiled whatever of it is padding, so the smallest video that the model makes is enough: it costs
the transformer as much as one that fills the bucket, and the encoders and the VAE next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vllm_omni_diffusion_compile.packed_length.buckets import PIN, Buckets
from vllm_omni_diffusion_compile.packed_length.rows import PIXELS_PER_ROW, Reference, Shape, Task, frame_rows

# The shortest video is 4 s of 24 frames a second.
_FRAMES = 96
_SIZE = 64
# The most tokens that a warmup prompt may have.
PROMPT_ROOM = 96
# A keyframe or reference is sent as a square of this many pixels, the smallest that is accepted, and looked at by the
# text encoder: a row for each 32 x 32 pixels of what it is scaled to, 256 x 256 for a keyframe and 2048 x 2048 for a
# reference.
IMAGE_SIZE = 256
_REFERENCE_SIZE = 2048
# The first step has one timestep less than the others, since those of video and sound start out equal; with static
# shapes each number of timesteps is compiled by itself. 0.28.0 takes one step less than it is asked for.
STEPS = 3


@dataclass(frozen=True, kw_only=True)
class WarmRequest:
    """A request that is padded to one bucket.

    Args:
        shape: What it asks for.
        length: The bucket, which it pins.
        steps: Denoise steps that it needs, so that each number of timesteps has been compiled.
    """

    shape: Shape
    length: int
    steps: int = STEPS

    @property
    def images(self) -> int:
        """How many images it brings, each `IMAGE_SIZE` x `IMAGE_SIZE`: keyframes or references."""
        return self.shape.keyframes + len(self.shape.references)

    @property
    def extra_args(self) -> dict[str, Any]:
        """Its `extra_args`."""
        return {"task": self.shape.task, "aspect_ratio": "1:1", PIN: self.length}


def warm_requests(buckets: Buckets, tasks: Iterable[Task]) -> list[WarmRequest]:
    """Return a request for each bucket and task, the longest bucket first: if memory is short, it fails at once.

    A bucket that no request of a task fits into is left out for it.

    Args:
        buckets: The server's.
        tasks: What its users ask for: those with keyframes or references have a timestep of their own.
    """
    shapes = [_smallest(task) for task in tasks]
    return [
        WarmRequest(shape=shape, length=length)
        for length in reversed(buckets.lengths)
        for shape in shapes
        if shape.used_rows <= length
    ]


def _smallest(task: Task) -> Shape:
    """Return the smallest request of a task, with room for its prompt and for what the text encoder sees of images."""
    seen = {"t2va": 0, "fl2va": IMAGE_SIZE, "ref2va": _REFERENCE_SIZE}[task]
    references = (Reference(kind="image", width=_REFERENCE_SIZE, height=_REFERENCE_SIZE),) if task == "ref2va" else ()
    return Shape(
        task=task,
        width=_SIZE,
        height=_SIZE,
        frames=_FRAMES,
        keyframes=1 if task == "fl2va" else 0,
        references=references,
        prompt_rows=PROMPT_ROOM + (frame_rows(seen, seen) if seen >= PIXELS_PER_ROW else 0),
    )
