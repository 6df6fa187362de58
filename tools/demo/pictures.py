"""Requests a picture and times it."""

from __future__ import annotations

import base64
import io
import time
from pathlib import Path

import httpx
from PIL import Image, UnidentifiedImageError

from tools.demo.server import ServerError
from vllm_omni_diffusion_compile.warmup.plan import Size

PROMPT = "a lighthouse at dusk, waves against the rocks"
STEPS = 4
SEED = 1
# A first request on a slow machine may wait for a compiler.
_LIMIT_S = 600.0


def request(client: httpx.Client, size: Size, file: Path | None = None) -> float:
    """Request one picture.

    Args:
        client: Has the server's address.
        size: What to ask for.
        file: Where the picture is saved, as PNG; None drops it after it was checked.

    Returns:
        Seconds until the whole answer was there.

    Raises:
        ServerError: The answer is an error, or no picture of this size.
    """
    body = {"prompt": PROMPT, "size": str(size), "num_inference_steps": STEPS, "seed": SEED, "n": 1}
    started = time.monotonic()
    try:
        answer = client.post("/v1/images/generations", json=body, timeout=_LIMIT_S)
    except httpx.TransportError as error:
        raise ServerError(f"a request of {size} got no answer: {type(error).__name__}: {error}") from error
    seconds = time.monotonic() - started
    if answer.status_code != httpx.codes.OK:
        raise ServerError(f"a request of {size} was answered with status {answer.status_code}: {answer.text[:500]}")
    picture = decoded(answer)
    if picture.size != (size.width, size.height):
        raise ServerError(f"a request of {size} was answered with a picture of {picture.width}x{picture.height}")
    if file is not None:
        picture.save(file, format="PNG")
    return seconds


def decoded(answer: httpx.Response) -> Image.Image:
    """Decode the picture in an answer of the images endpoint.

    Raises:
        ServerError: There is none, or it is broken.
    """
    try:
        picture = Image.open(io.BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"])))
        picture.load()
    except (ValueError, LookupError, TypeError, UnidentifiedImageError, OSError) as error:
        raise ServerError(
            f"an answer holds no picture ({type(error).__name__}: {error}): {answer.text[:200]}"
        ) from error
    return picture
