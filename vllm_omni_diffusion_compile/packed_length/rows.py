"""From a MiniMax-H3 request to the rows of its packed sequence.

The sequence is `text | conditions | audio | video | padding`. What is not padding is called used.

    P         rows of one latent frame: (width // 32) * (height // 32)
    frames    the smallest 17n + 5 that is at least what was asked for
    video     (5n + 2) * P
    audio     2 channels * round(frames / 24 * 40)
    keyframe  P each (FL2VA)
    reference P of its own for an image, 2t for audio, (5n + 2) * P + 2t for a video (Ref2VA)

Source: diffusion/models/minimax_h3/packed_sequence.py and time_request.py of vLLM-Omni 0.28.0 and 0.30.0. The contract
tests compare these formulas with the packers of the installed release.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vllm_omni_diffusion_compile.settings import aligned

Task = Literal["t2va", "fl2va", "ref2va"]
TASKS: tuple[Task, ...] = ("t2va", "fl2va", "ref2va")
ReferenceKind = Literal["image", "audio", "video"]

FPS = 24
# The VAE makes one latent pixel of 16, and the transformer one row of 2x2 latent pixels.
PIXELS_PER_ROW = 32
_LATENT_PIXELS_PER_ROW = 2
AUDIO_HZ = 40
AUDIO_CHANNELS = 2
# What a request that states no length gets.
DEFAULT_FRAMES: Mapping[Task, int] = {"t2va": 209, "fl2va": 209, "ref2va": 124}


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """One reference of a Ref2VA request, as it is encoded.

    Args:
        kind: What it is.
        width: Of an image or a video, in pixels. MiniMax-H3 scales what is sent before it is encoded: an image so that
            its short side has 2048 pixels.
        height: The same.
        frames: Of a video; it is cut to 17n + 5.
        audio_steps: Of audio, or of a video with sound: 40 a second.
    """

    kind: ReferenceKind
    width: int = 0
    height: int = 0
    frames: int = 0
    audio_steps: int = 0

    @property
    def rows(self) -> int:
        """The rows it takes."""
        sound = AUDIO_CHANNELS * self.audio_steps
        if self.kind == "audio":
            return sound
        still = frame_rows(self.width, self.height)
        return still if self.kind == "image" else latent_frames(self.frames) * still + sound


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What decides how many rows a request has.

    Args:
        task: Text, keyframes or references to video with audio.
        width: In pixels; what exceeds a multiple of 32 is cut off.
        height: The same.
        frames: Asked for; None for the model's own default.
        keyframes: Of FL2VA: 1 or 2.
        references: Of Ref2VA.
        prompt_rows: Tokens of the prompt, those of keyframes and references included.
    """

    task: Task
    width: int
    height: int
    frames: int | None = None
    keyframes: int = 0
    references: tuple[Reference, ...] = ()
    prompt_rows: int = 0

    @property
    def used_rows(self) -> int:
        """Rows that are not padding."""
        frames = snapped_frames(self.frames or DEFAULT_FRAMES[self.task])
        still = frame_rows(self.width, self.height)
        return (
            self.prompt_rows
            + self.keyframes * still
            + sum(reference.rows for reference in self.references)
            + AUDIO_CHANNELS * audio_steps(frames / FPS)
            + latent_frames(frames) * still
        )

    @property
    def packed_rows(self) -> int:
        """What the release pads it to by itself."""
        return aligned(self.used_rows)


def frame_rows(width: int, height: int) -> int:
    """Return the rows of one latent frame of `width` x `height` pixels."""
    return (width // PIXELS_PER_ROW) * (height // PIXELS_PER_ROW)


def snapped_frames(frames: int) -> int:
    """Return the frames that are made when `frames` are asked for: the next 17n + 5."""
    return frames + (5 - frames) % 17


def latent_frames(frames: int) -> int:
    """Return the latent frames of 17n + 5 frames, or of a video that is cut to so many."""
    return 2 if frames <= 5 else (frames - 5) // 17 * 5 + 2


def audio_steps(seconds: float) -> int:
    """Return the latent steps of audio."""
    # A half is rounded to the even neighbour, there as here.
    return round(seconds * AUDIO_HZ)


def rows_of_latents(  # noqa: PLR0913 - what the release hands to its packers
    *,
    text_len: int,
    latent_t: int,
    latent_h: int,
    latent_w: int,
    audio_t: int,
    keyframes: int = 0,
    ref_blocks: Iterable[Mapping[str, Any]] = (),
) -> int:
    """Return the used rows of what is handed to vLLM-Omni's packers, under their names.

    Args:
        text_len: Tokens of the prompt.
        latent_t: Latent frames.
        latent_h: Latent height, in units of 16 pixels.
        latent_w: Latent width.
        audio_t: Latent audio steps.
        keyframes: How many.
        ref_blocks: Mappings with `kind`, and what that kind has of `ref_audio_t`, `latent_t`, `latent_h`, `latent_w`.
    """
    still = _latent_frame_rows(latent_h, latent_w)
    conditions = keyframes * still + sum(_block_rows(block) for block in ref_blocks)
    return text_len + conditions + AUDIO_CHANNELS * audio_t + latent_t * still


def _block_rows(block: Mapping[str, Any]) -> int:
    sound = AUDIO_CHANNELS * int(block.get("ref_audio_t", 0))
    kind = block.get("kind", block.get("type"))
    if kind == "audio":
        return sound
    still = _latent_frame_rows(int(block["latent_h"]), int(block["latent_w"]))
    return still if kind == "image" else int(block["latent_t"]) * still + sound


def _latent_frame_rows(latent_h: int, latent_w: int) -> int:
    return (latent_h // _LATENT_PIXELS_PER_ROW) * (latent_w // _LATENT_PIXELS_PER_ROW)
