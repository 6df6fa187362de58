"""Reading the shape of a request from flags, YAML or a line of a trace."""

from __future__ import annotations

import contextlib
import difflib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from vllm_omni_diffusion_compile.errors import RequestError
from vllm_omni_diffusion_compile.packed_length.rows import (
    FPS,
    TASKS,
    Reference,
    ReferenceKind,
    Shape,
    Task,
    audio_steps,
)

PROMPT_ROWS = "prompt_rows"
COUNT = "count"
REFERENCES = "references"
KEYS = ("task", "width", "height", "frames", "seconds", "keyframes", REFERENCES, PROMPT_ROWS, COUNT)
_KNOWN = frozenset(KEYS)
# As vLLM-Omni's packers name the same.
_PACKERS_NAMES = {"type": "kind", "ref_audio_t": "audio_steps", "audio_t": "audio_steps"}
_REFERENCE_KEYS = ("kind", "width", "height", "frames", "seconds", "audio_steps", "audio_seconds")

# What is remembered of what was read, so that a trace of any length fits into memory.
MOST_KEPT = 1 << 16

# Keeps every sum of rows times requests of a trace far below what would slow down.
MOST_REQUESTS = 10**9
SMALLEST = 32
LARGEST = 1 << 16
MOST_FRAMES = 1 << 20
_REFERENCE_EXAMPLE = "'image:1024x768', 'audio:3.5s', 'video:640x352:56' or 'video:640x352:56:3.5s'"
_SIZE = re.compile(r"(\d{1,6})[x*](\d{1,6})")


def read_shape(given: Mapping[str, Any], where: str = "") -> Shape:
    """Read what decides how many rows a request has; `count` is left to the caller.

    A key that is None or an empty text counts as left out; a key that is not known is passed over, unless it looks like
    a misspelt one.

    Args:
        given: Keys and values as in a line of a trace.
        where: Names the place in messages.

    Raises:
        RequestError: A value that no request can have, or values that contradict each other.
    """
    for name in given.keys() - _KNOWN:
        check_key(name, where)
    stated = {name: value for name, value in given.items() if value is not None and value != ""}
    for name in ("width", "height"):
        if name not in stated:
            raise RequestError(f"{where}{name} is missing, expected pixels")
    references = read_references(stated.get(REFERENCES, ()), where)
    keyframes = whole(stated.get("keyframes", 0), f"{where}keyframes", least=0, most=2)
    return Shape(
        task=_task(stated.get("task"), keyframes, references, where),
        width=whole(stated["width"], f"{where}width", least=SMALLEST, most=LARGEST),
        height=whole(stated["height"], f"{where}height", least=SMALLEST, most=LARGEST),
        frames=_frames(stated, where),
        keyframes=keyframes,
        references=references,
        prompt_rows=whole(stated.get(PROMPT_ROWS, 0), f"{where}{PROMPT_ROWS}", least=0, most=MOST_FRAMES),
    )


def check_key(name: object, where: str = "") -> None:
    """Refuse a key that looks like a misspelt one.

    Raises:
        RequestError: It does.
    """
    near = difflib.get_close_matches(str(name), KEYS, n=1, cutoff=0.8)
    if near:
        raise RequestError(f"{where}unknown key {name!r}; did you mean {near[0]!r}?")


def read_count(value: object, where: str = "") -> int:
    """Read how many requests a line stands for.

    Raises:
        RequestError: Not a whole number of at least 1.
    """
    return whole(value, f"{where}{COUNT}", least=1, most=MOST_REQUESTS)


def read_references(value: object, where: str = "") -> tuple[Reference, ...]:
    """Read a list of references: mappings, lists such as `["image", 1024, 768]` or texts such as `image:1024x768`.

    A text stands for a list: JSON, or references separated by semicolons. A zero stands for none.

    Raises:
        RequestError: Naming the reference that is wrong.
    """
    if isinstance(value, str):
        if value.lstrip().startswith("["):
            try:
                value = json.loads(value)
            except ValueError as error:
                raise RequestError(f"{where}references is {_shown(value)}, expected a JSON list: {error}") from None
        else:
            value = [part.strip() for part in value.split(";") if part.strip()]
    if value in (0, ["0"]):
        return ()
    if not isinstance(value, Sequence):
        raise RequestError(f"{where}references is {_shown(value)}, expected a list such as [{_REFERENCE_EXAMPLE}]")
    return tuple(_reference(item, f"{where}references[{index}]") for index, item in enumerate(value))


def read_size(text: str, named: str) -> tuple[int, int]:
    """Read width and height from a text such as `1344x768`.

    Raises:
        RequestError: It is no size.
    """
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None:
        raise RequestError(f"{named} is {_shown(text)}, expected a size such as 1344x768")
    return int(match[1]), int(match[2])


def whole(value: object, named: str, *, least: int, most: int) -> int:
    """Read a whole number; `124.0` is one, as spreadsheets write it.

    Raises:
        RequestError: It is none, or outside of the bounds.
    """
    if type(value) is int and least <= value <= most:
        return value
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value) if len(value) <= 32 else value
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{named} is {_shown(value)}, expected a whole number")
    if not least <= value <= most:
        raise RequestError(f"{named} is {_shown(value)}, expected {least} to {most}")
    return value


def _frames(stated: Mapping[str, Any], where: str) -> int | None:
    if "seconds" in stated:
        if "frames" in stated:
            raise RequestError(f"{where}seconds is given beside frames; leave one of the two out")
        seconds = _seconds(stated["seconds"], f"{where}seconds")
        return max(1, round(seconds * FPS))
    if "frames" in stated:
        return whole(stated["frames"], f"{where}frames", least=1, most=MOST_FRAMES)
    return None


def _seconds(value: object, named: str) -> float:
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value.removesuffix("s"))
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise RequestError(f"{named} is {_shown(value)}, expected a number of seconds above 0")
    if value * FPS > MOST_FRAMES:
        raise RequestError(f"{named} is {_shown(value)}, expected at most {MOST_FRAMES // FPS}")
    return float(value)


def _task(value: object, keyframes: int, references: Sequence[Reference], where: str) -> Task:
    if value is None:
        task: Task = "ref2va" if references else "fl2va" if keyframes else "t2va"
    else:
        known = next((task for task in TASKS if isinstance(value, str) and task == value.strip().lower()), None)
        if known is None:
            raise RequestError(f"{where}task is {_shown(value)}, expected {', '.join(TASKS[:-1])} or {TASKS[-1]}")
        task = known
    if (keyframes > 0) != (task == "fl2va"):
        expected = "1 or 2" if task == "fl2va" else "0"
        raise RequestError(f"{where}keyframes is {keyframes}, expected {expected} for the task {task}")
    if bool(references) != (task == "ref2va"):
        expected = "at least one" if task == "ref2va" else "none"
        raise RequestError(f"{where}references has {len(references)}, expected {expected} for the task {task}")
    return task


def _reference(item: object, named: str) -> Reference:
    if isinstance(item, str):
        kind, *fields = item.split(":")
        return _from_fields(kind.strip().lower(), fields, item, named)
    if isinstance(item, Sequence) and not isinstance(item, (bytes, bytearray)) and item:
        return _from_list(item, named)
    if not isinstance(item, Mapping):
        _refuse(item, named)
    item = {_PACKERS_NAMES.get(name, name): value for name, value in item.items()}
    unknown = item.keys() - set(_REFERENCE_KEYS)
    if unknown:
        raise RequestError(
            f"{named} has the unknown key {min(map(str, unknown))!r}; known: {', '.join(_REFERENCE_KEYS)}"
        )
    stated = item.get("kind")
    if stated == "image":
        return _made("image", named, (item.get("width"), item.get("height")))
    if stated == "audio":
        steps = item.get("audio_steps")
        seconds = item.get("seconds", item.get("audio_seconds"))
        return Reference(kind="audio", audio_steps=_steps(steps, seconds, named, required=True))
    if stated in ("video", "video_audio"):
        frames = item.get("frames")
        if frames is None and "seconds" in item:
            frames = max(1, round(_seconds(item["seconds"], f"{named}.seconds") * FPS))
        steps = _steps(item.get("audio_steps"), item.get("audio_seconds"), named, required=False)
        return _made("video", named, (item.get("width"), item.get("height")), frames, steps)
    raise RequestError(f"{named}.kind is {_shown(stated)}, expected image, audio or video")


def _from_fields(kind: str, fields: Sequence[str], item: str, named: str) -> Reference:
    """Read `image:1024x768`, `audio:120` or `audio:3s`, `video:640x352:56` and with sound `video:640x352:56:3s`."""
    if kind == "image" and len(fields) == 1:
        return _made("image", named, read_size(fields[0], named))
    if kind == "audio" and len(fields) == 1:
        return Reference(kind="audio", audio_steps=_written_steps(fields[0], named))
    if kind == "video" and len(fields) in (2, 3):
        steps = _written_steps(fields[2], named) if len(fields) == 3 else 0
        frames: object = fields[1]
        if fields[1].endswith("s"):
            frames = max(1, round(_seconds(fields[1], f"{named}.frames") * FPS))
        return _made("video", named, read_size(fields[0], named), frames, steps)
    return _refuse(item, named)


def _from_list(item: Sequence[Any], named: str) -> Reference:
    """Read `["image", width, height]`, `["audio", steps]` or `["video", width, height, frames, steps]`."""
    kind, *fields = item
    if kind == "image" and len(fields) == 2:
        return _made("image", named, (fields[0], fields[1]))
    if kind == "audio" and len(fields) == 1:
        return Reference(kind="audio", audio_steps=_steps(fields[0], None, named, required=True))
    if kind == "video" and len(fields) in (3, 4):
        return _made(
            "video",
            named,
            (fields[0], fields[1]),
            fields[2],
            _steps(fields[3] if len(fields) == 4 else None, None, named),
        )
    return _refuse(item, named)


def _made(
    kind: ReferenceKind, named: str, size: tuple[object, object], frames: object = None, steps: int = 0
) -> Reference:
    return Reference(
        kind=kind,
        width=whole(size[0], f"{named}.width", least=SMALLEST, most=LARGEST),
        height=whole(size[1], f"{named}.height", least=SMALLEST, most=LARGEST),
        frames=whole(frames, f"{named}.frames", least=1, most=MOST_FRAMES) if kind == "video" else 0,
        audio_steps=steps,
    )


def _steps(steps: object, seconds: object, named: str, *, required: bool = False) -> int:
    if steps is not None:
        return whole(steps, f"{named}.audio_steps", least=0, most=MOST_FRAMES)
    if seconds is not None:
        return audio_steps(_seconds(seconds, f"{named}.seconds"))
    if required:
        raise RequestError(f"{named} says nothing of its length, expected seconds or audio_steps (40 a second)")
    return 0


def _written_steps(text: str, named: str) -> int:
    return _steps(None, text, named) if text.endswith("s") else _steps(text, None, named)


def _refuse(item: object, named: str) -> NoReturn:
    raise RequestError(f"{named} is {_shown(item)}, expected one such as {_REFERENCE_EXAMPLE}")


def _shown(value: object) -> str:
    if isinstance(value, int) and abs(value) > 10**30:
        return "a number of more than 30 digits"
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


def read_shapes(given: object, where: str) -> Iterable[tuple[Shape, int]]:
    """Read a list of mappings, as a YAML file holds it: each a shape and how many requests have it.

    Raises:
        RequestError: It is no such list, or one of its entries is wrong.
    """
    if not isinstance(given, Sequence) or isinstance(given, (str, bytes)):
        raise RequestError(f"{where}: found {_shown(given)}, expected a list of mappings with width, height and so on")
    for index, item in enumerate(given):
        place = f"{where}[{index}]: "
        if not isinstance(item, Mapping):
            raise RequestError(f"{place}found {_shown(item)}, expected a mapping with width, height and so on")
        yield read_shape(item, place), read_count(item.get(COUNT, 1), place)
