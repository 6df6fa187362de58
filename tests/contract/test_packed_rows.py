"""Rows of a request against the packers of the installed release."""

from __future__ import annotations

import random
from typing import Any

import pytest
from vllm_omni.diffusion.models.minimax_h3.packed_sequence import (
    minimax_h3_packed_sequence,
    minimax_h3_packed_sequence_ref2va_blocks,
)
from vllm_omni.diffusion.models.minimax_h3.time_request import MINIMAX_H3_SHAPE_PLANNER as PLANNER
from vllm_omni.model_executor.models.minimax_h3.preprocessing import resolve_minimax_h3_output_canvas

from vllm_omni_diffusion_compile.packed_length.known import Asked
from vllm_omni_diffusion_compile.packed_length.rows import Reference, Shape, latent_frames, rows_of_latents

pytestmark = pytest.mark.contract

CONFIGURATIONS = 120
KEYFRAMES: dict[int, list[list[int]]] = {1: [[0], [-1]], 2: [[0, -1]]}


def _size(draw: random.Random, most: int) -> tuple[int, int]:
    return draw.randrange(64, most), draw.randrange(64, most)


def _reference(draw: random.Random) -> Reference:
    width, height = _size(draw, 900)
    kind = draw.choice(("image", "audio", "video"))
    if kind == "image":
        return Reference(kind="image", width=width, height=height)
    if kind == "audio":
        return Reference(kind="audio", audio_steps=draw.randrange(80, 600))
    sound = draw.choice((0, draw.randrange(80, 300)))
    return Reference(kind="video", width=width, height=height, frames=draw.randrange(5, 150), audio_steps=sound)


def _block(reference: Reference) -> dict[str, Any]:
    latents = {"latent_h": reference.height // 32 * 2, "latent_w": reference.width // 32 * 2}
    if reference.kind == "image":
        return {"kind": "image", **latents}
    if reference.kind == "audio":
        return {"kind": "audio", "ref_audio_t": reference.audio_steps}
    return {
        "kind": "video_audio" if reference.audio_steps else "video",
        "ref_audio_t": reference.audio_steps,
        "latent_t": PLANNER.video_latent_t(reference.frames),
        **latents,
    }


def _shape(draw: random.Random) -> Shape:
    width, height = _size(draw, 1000)
    about: dict[str, Any] = {
        "width": width,
        "height": height,
        "frames": draw.randrange(24, 260),
        "prompt_rows": draw.randrange(1, 900),
    }
    match draw.choice(("t2va", "fl2va", "ref2va")):
        case "fl2va":
            return Shape(task="fl2va", keyframes=draw.randrange(1, 3), **about)
        case "ref2va":
            references = tuple(_reference(draw) for _ in range(draw.randrange(1, 4)))
            return Shape(task="ref2va", references=references, **about)
    return Shape(task="t2va", **about)


def _packed(shape: Shape, draw: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the release packs for a request, and what it was handed for that."""
    assert shape.frames is not None
    frames = PLANNER.align_frame_count(shape.frames)
    latents = {
        "text_len": shape.prompt_rows,
        "latent_t": PLANNER.video_latent_t(frames),
        "latent_h": shape.height // 32 * 32 // 16,
        "latent_w": shape.width // 32 * 32 // 16,
        "audio_t": PLANNER.audio_latent_t(frames / 24),
    }
    if shape.task == "ref2va":
        blocks = [_block(reference) for reference in shape.references]
        packed = minimax_h3_packed_sequence_ref2va_blocks(**latents, ref_blocks=blocks)
        return packed, {**latents, "ref_blocks": blocks}
    keyframes = draw.choice(KEYFRAMES[shape.keyframes]) if shape.keyframes else None
    packed = minimax_h3_packed_sequence(
        **latents,
        include_keyframe_cond=shape.task == "fl2va",
        keyframe_frame_indices=keyframes,
        frame_count=frames if keyframes else None,
    )
    return packed, {**latents, "keyframes": shape.keyframes}


@pytest.mark.parametrize("seed", range(3))
def test_rows_are_those_that_the_release_packs(seed: int) -> None:
    draw = random.Random(seed)
    tasks = set()
    for _ in range(CONFIGURATIONS // 3):
        shape = _shape(draw)
        packed, latents = _packed(shape, draw)
        assert shape.used_rows == int(packed["cu_seqlens"][1]), shape
        assert shape.packed_rows == int(packed["seq_len"]), shape
        assert rows_of_latents(**latents) == shape.used_rows, shape
        tasks.add(shape.task)
    assert tasks == {"t2va", "fl2va", "ref2va"}


def test_frames_and_sound_are_those_that_the_release_makes() -> None:
    for frames in range(1, 800):
        shape = Shape(task="t2va", width=32, height=32, frames=frames)
        made = PLANNER.align_frame_count(frames)
        assert shape.used_rows == PLANNER.video_latent_t(made) + 2 * PLANNER.audio_latent_t(made / 24)
        assert latent_frames(frames) == PLANNER.video_latent_t(frames)


def test_the_sizes_of_the_documentation() -> None:
    assert Shape(task="t2va", width=1344, height=768, frames=209).used_rows == 63_192
    assert Shape(task="t2va", width=1344, height=768, frames=168).used_rows == 53_000
    assert Shape(task="t2va", width=1344, height=768).used_rows == 63_192, "209 frames where nothing is said"


def test_a_named_ratio_stands_for_the_size_of_the_release() -> None:
    ratios = {"21:9": 21 / 9, "16:9": 16 / 9, "4:3": 4 / 3, "1:1": 1.0, "3:4": 3 / 4, "9:16": 9 / 16}
    for name, ratio in ratios.items():
        height, width = resolve_minimax_h3_output_canvas(ratio, 768)
        stated = Asked(width=width, height=height, frames=209)
        assert Asked(extra={"aspect_ratio": name}).least_rows == stated.least_rows, (name, width, height)
