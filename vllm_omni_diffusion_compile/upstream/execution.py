"""What a worker knows of the requests that it executes: how long they take, what they ask for, and in which state."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from vllm_omni_diffusion_compile.compile.events import LOG, compiled_graphs

# Begins the ids of requests for declared shapes.
DECLARED = "warmup-declared-"

# On a worker: threads that torch computes with, as its first request found them; and its executions since it was asked.
_THREADS = "_diffusion_compile_threads"
_EXECUTIONS = "_diffusion_compile_executions"

# A prompt of any length is made of these; a model's tokenizer decides how many it takes.
_WORDS = (
    "a photograph of a lighthouse at dusk , waves against the rocks , warm light in the windows , gulls over the pier ,"
    " a small boat on its way home , clouds in the west"
).split()
# Of a text in a request's extra_args, for a log: what is longer, or has spaces, may be somebody's own words, and what
# has slashes a file of theirs.
_LONGEST_TEXT = 40
# What is said of a negative prompt: that there was one, and not what it was.
_NEGATIVE_PROMPT = "low quality"


@contextlib.contextmanager
def executing(worker: Any, arguments: tuple[Any, ...]) -> Iterator[None]:
    """Surround the execution of a request, or of one step of it.

    Args:
        worker: Who executes it.
        arguments: Of its method, without itself: a request first, or the scheduler's output.
    """
    _same_threads(worker)
    requests = _requests(arguments)
    if requests:
        # As it was asked for: the pipeline fills in what was left out.
        asked = copy.copy(requests[0])
        asked.sampling_params = copy.copy(asked.sampling_params)
        LOG.describe = functools.cache(functools.partial(described, worker, asked))
        LOG.declared = not LOG.ready and str(asked.request_id).startswith(DECLARED)
    executions = vars(worker).setdefault(_EXECUTIONS, [])
    began = time.time()
    try:
        yield
    finally:
        executions.append((began, time.time()))
        del executions[:-1000]  # nobody asks a serving worker


def _same_threads(worker: Any) -> None:
    """Compute with as many threads as the first request did: torch guards on their number, as on a tensor's shape.

    vLLM's renderers set torch to one thread for a moment, in every thread that is new in this moment, and the engine's
    is new when the first user's request comes.

    Source: `vllm.renderers.base`, `set_default_torch_num_threads`.
    """
    threads = vars(worker).setdefault(_THREADS, torch.get_num_threads())
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


def _requests(arguments: tuple[Any, ...]) -> list[Any]:
    """Find the requests in what a worker's method was given; a later step of known ones has none."""
    first = arguments[0] if arguments else None
    found = first if isinstance(first, list) else getattr(first, "scheduled_new_reqs", None)
    if found is None:
        found = [] if first is None else [first]
    requests = [getattr(item, "req", item) for item in found]
    return [request for request in requests if hasattr(request, "sampling_params")]


def described(worker: Any, request: Any) -> dict[str, Any]:
    """Say what decides the shapes of a request, as a shape to declare; nothing of what it says in words."""
    params = request.sampling_params
    prompt = request.prompt if isinstance(request.prompt, Mapping) else {"prompt": request.prompt}
    shape: dict[str, Any] = {"width": params.width, "height": params.height}
    if (params.num_frames or 1) > 1:
        shape["frames"] = params.num_frames
    shape["steps"] = params.num_inference_steps
    if params.guidance_scale_provided:
        shape["guidance_scale"] = params.guidance_scale
    shape["true_cfg_scale"] = params.true_cfg_scale
    if prompt.get("negative_prompt"):
        shape["negative_prompt"] = _NEGATIVE_PROMPT
    sizes = [size for size in map(_size, _pictures(prompt)) if size]
    if sizes:
        own = f"{params.width}x{params.height}"
        shape["images"] = len(sizes) if set(sizes) == {own} else sizes
    shape["prompt_rows"] = prompt_rows(worker, str(prompt.get("prompt") or "")) or None
    shape["lora"] = _adapter(params)
    extra_args = {
        name: value for name, value in (params.extra_args or {}).items() if _harmless(name) and _harmless(value)
    }
    if extra_args:
        shape["extra_args"] = extra_args
    return {name: value for name, value in shape.items() if _stated(value)}


def _stated(value: object) -> bool:
    """Whether a request says it, and JSON can."""
    return value is not None and not (isinstance(value, float) and not math.isfinite(value))


def _pictures(prompt: Mapping[str, Any]) -> list[Any]:
    pictures = (prompt.get("multi_modal_data") or {}).get("image")
    return list(pictures) if isinstance(pictures, (list, tuple)) else [] if pictures is None else [pictures]


def _size(picture: Any) -> str | None:
    size = getattr(picture, "size", None)
    return f"{size[0]}x{size[1]}" if isinstance(size, tuple) and len(size) == 2 else None


def _adapter(params: Any) -> dict[str, Any] | None:
    """The adapter that a request names; its path is one of the server's, without which it could not be declared."""
    lora, scale = params.lora_request, params.lora_scale
    if lora is None or scale == 0:  # which is how a request says that it wants none
        return None
    named = {"name": lora.lora_name} if _harmless(lora.lora_name) else {}
    return named | {"path": lora.lora_path} | ({"scale": scale} if scale != 1 and _stated(scale) else {})


def _harmless(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= _LONGEST_TEXT and value.isprintable() and not set(" /\\") & set(value)
    return isinstance(value, (bool, int, float)) and _stated(value)


def _tokenizer(worker: Any) -> Any:
    pipeline = getattr(getattr(worker, "model_runner", None), "pipeline", None)
    found = getattr(pipeline, "tokenizer", None) or getattr(getattr(pipeline, "processor", None), "tokenizer", None)
    return found if callable(found) else None


def prompt_rows(worker: Any, prompt: str) -> int | None:
    """Count the tokens of a prompt with the model's own tokenizer; None if it has none, or none that counts."""
    tokenizer = _tokenizer(worker)
    try:
        return len(tokenizer(prompt)["input_ids"]) if tokenizer is not None else None
    except (AttributeError, KeyError, TypeError, ValueError):  # a tokenizer of another kind, which counts nothing
        return None


def add_compile_usage(_: None) -> Any:
    return diffusion_compile_usage


def diffusion_compile_usage(self: Any) -> dict[str, Any]:
    """What this worker compiled and executed, for the warmup of declared shapes.

    Returns:
        `graphs`: graphs compiled in this process; `events` and `compile_s`: compilations of regions, and the seconds
        they took; `eager`: what runs eagerly since the compiler failed for it, in words; `executions`: begin and end,
        in seconds since the epoch, of what was executed since this was asked last.
    """
    all_events = LOG.since()[0]
    events = [event for event in all_events if event.kind in ("compilation", "recompilation")]
    failed = [event for event in all_events if event.kind in ("fallback", "set-up failed")]
    executions, self.__dict__[_EXECUTIONS] = vars(self).get(_EXECUTIONS, []), []
    return {
        "graphs": compiled_graphs(),
        "events": len(events),
        "compile_s": sum(event.seconds for event in events),
        "eager": [f"{event.component} {event.region} ({event.error or event.reason})" for event in failed],
        "executions": executions,
    }


def add_compile_prompt(_: None) -> Any:
    return diffusion_compile_prompt


def diffusion_compile_prompt(self: Any, rows: int | None, prompt: str) -> tuple[str, int | None]:
    """Make a prompt whose tokens come as near to a number as the model's tokenizer allows, and not above it.

    Args:
        self: The worker.
        rows: Tokens, special ones included; None takes the prompt as it is.
        prompt: Used where there is nothing to count with.

    Returns:
        The prompt, and its tokens as counted.
    """
    if rows is None or prompt_rows(self, prompt) is None:
        return prompt, prompt_rows(self, prompt)
    low, high = 1, rows + 1  # words; none has less than a token
    while high - low > 1:
        middle = (low + high) // 2
        if (prompt_rows(self, _sentence(middle)) or 0) <= rows:
            low = middle
        else:
            high = middle
    text = _sentence(low)
    if (prompt_rows(self, text) or 0) > rows:
        text = "a"
    # What is missing is less than a word; the shortest one costs a token or two, and a letter one or none.
    for piece in (" a", "a"):
        for _ in range(len(max(_WORDS, key=len)) + 1):
            if (prompt_rows(self, text) or 0) < rows and (prompt_rows(self, text + piece) or 0) <= rows:
                text += piece
    return text, prompt_rows(self, text)


def _sentence(words: int) -> str:
    repeated = _WORDS * (words // len(_WORDS) + 1)
    return " ".join(repeated[:words])
