"""From a shape to the request that asks a server for it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Any, Literal

from vllm_omni_diffusion_compile.errors import BenchError
from vllm_omni_diffusion_compile.settings import Shape

Task = Literal["image", "video"]
# The synchronous one: the asynchronous answers when asked, so its times would be those of the asking.
PATHS: Mapping[Task, str] = {"image": "/v1/images/generations", "video": "/v1/videos/sync"}


def body(  # noqa: PLR0913 - each is one field of a request
    shape: Shape, task: Task, *, prompt: str, seed: int, steps: int | None, more: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields of a request for a shape.

    Args:
        shape: What is asked for.
        task: Of the model.
        prompt: What to make.
        seed: The same for every request.
        steps: Denoise steps of shapes that name none; None leaves it to the model.
        more: Further fields, which win.

    Raises:
        BenchError: The bench cannot ask for it.
    """
    if shape.images:
        raise BenchError(f"--shape {shape}: the bench sends no input pictures; leave images out")
    if shape.frames is not None and task == "image":
        raise BenchError(f"--shape {shape} has frames, and this model makes images; leave them out")
    fields = {
        "prompt": prompt,
        "size": shape.size,
        "seed": seed,
        "num_inference_steps": shape.steps or steps,
        "guidance_scale": shape.guidance_scale,
        "true_cfg_scale": shape.true_cfg_scale,
        "negative_prompt": shape.negative_prompt,
        "num_frames": shape.frames,
        "extra_params": shape.extra_args or None,
        "lora": None if shape.lora is None else shape.lora.as_request,
    }
    if task == "image":
        fields["n"] = 1
    return {name: value for name, value in fields.items() if value is not None} | dict(more)


def encoded(fields: Mapping[str, Any], task: Task) -> tuple[bytes, str]:
    """Encode a request as the server's endpoint wants it; return the bytes and their content type."""
    if task == "image":
        return json.dumps(fields).encode(), "application/json"
    boundary = uuid.uuid4().hex
    parts = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n'
        f"{json.dumps(value) if isinstance(value, (dict, list)) else value}\r\n"
        for name, value in fields.items()
    ]
    return "".join([*parts, f"--{boundary}--\r\n"]).encode(), f"multipart/form-data; boundary={boundary}"
