"""What a request certainly needs, before anything of it is looked at."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_diffusion_compile.packed_length.known import Asked
from vllm_omni_diffusion_compile.packed_length.rows import Reference, Shape, Task

WIDE: dict[str, Any] = {"width": 1344, "height": 768}


@pytest.mark.parametrize(
    ("asked", "rows"),
    [
        (Asked(**WIDE), 63_192),
        (Asked(**WIDE, frames=168), 53_000),
        (Asked(**WIDE, frames=209, extra={"duration": "7"}), 53_000),
        (Asked(**WIDE, extra={"target": {"duration_seconds": 7}, "duration": 9}), 53_000),
        (Asked(extra={"aspect_ratio": "16:9", "duration": 7}), 53_000),
        (Asked(extra={"aspect_ratio": "9:16", "duration": 7}), 53_000),
        (Asked(**WIDE, frames=168, images=2), 53_000 + 2 * 1008),
        # What brings references and states no length has the shorter default.
        (Asked(**WIDE, media=True), 37 * 1008 + 414),
        (Asked(**WIDE, images=1), 37 * 1008 + 414 + 1008),
        (Asked(**WIDE, images=1, extra={"task": "fl2va"}), 63_192 + 1008),
        (Asked(), 0),
        (Asked(extra={"aspect_ratio": "adaptive"}), 0),
        (Asked(width="1344", height=768), 0),
    ],
)
def test_known_rows(asked: Asked, rows: int) -> None:
    assert asked.least_rows == rows


_ANY = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.lists(st.integers())
_EXTRA = st.dictionaries(
    st.sampled_from(["task", "target", "duration", "duration_seconds", "aspect_ratio"]),
    _ANY | st.dictionaries(st.sampled_from(["duration_seconds", "aspect_ratio"]), _ANY),
)


@given(extra=_EXTRA, width=_ANY, height=_ANY, frames=_ANY, images=st.integers(0, 12), media=st.booleans())
def test_whatever_is_asked_for_nothing_is_raised(**asked: Any) -> None:
    assert Asked(**asked).least_rows >= 0


_SIZES = st.tuples(st.integers(32, 4096), st.integers(32, 4096), st.integers(96, 400))


@given(_SIZES, st.integers(0, 2), st.integers(0, 3))
def test_no_request_needs_fewer(size: tuple[int, int, int], keyframes: int, images: int) -> None:
    about: dict[str, Any] = dict(zip(("width", "height", "frames"), size, strict=True))
    task: Task = "fl2va" if keyframes else "t2va"
    shapes = [(keyframes, Shape(task=task, keyframes=keyframes, prompt_rows=1, **about))]
    if images:
        references = (Reference(kind="image", width=2048, height=2048),) * images
        shapes.append((images, Shape(task="ref2va", references=references, prompt_rows=1, **about)))
    for brought, shape in shapes:
        assert Asked(**about, images=brought).least_rows < shape.used_rows
