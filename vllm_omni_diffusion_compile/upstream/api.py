"""Requests for MiniMax-H3 at the boundary: what is wrong with their packed length is answered before any work.

Without this, a bad pin is found by the worker when everything is encoded, and the client is told of a server error; of
an asynchronous request the server has by then answered that it is queued.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

from vllm_omni_diffusion_compile.errors import RequestError
from vllm_omni_diffusion_compile.packed_length.buckets import PIN, check_pin, check_pin_divides
from vllm_omni_diffusion_compile.packed_length.known import Asked
from vllm_omni_diffusion_compile.upstream.buckets import buckets_of, strict_ranks

_SERVING_CHAT = "vllm_omni.entrypoints.openai.serving_chat"
_MODELS = frozenset({"MiniMaxH3Pipeline", "MiniMaxH3ModularPipeline"})

# The engine that this process answers HTTP requests with: a process of the API server has one.
_served: weakref.ref[Any] | None = None


def remember_engine(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        global _served
        init(self, *args, **kwargs)
        engine = kwargs.get("engine_client", args[0] if args else None)
        _served = None if engine is None else weakref.ref(engine)

    return __init__


def check_video_request(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def __init__(self: Any, **data: Any) -> None:
        init(self, **data)
        engine = _served() if _served is not None else None
        if engine is None:
            return
        from fastapi import HTTPException

        try:
            _check(engine, functools.partial(_of_video_request, self), "extra_params")
        except RequestError as error:
            raise HTTPException(status_code=error.status, detail=str(error)) from None

    return __init__


def check_chat(create: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create)
    async def checked(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            for where, extra in _extras_of_chat(request):
                _check(self.engine_client, functools.partial(Asked, extra=extra), where)
        except RequestError as error:
            host = sys.modules[_SERVING_CHAT]
            return host.ErrorResponse(
                error=host.ErrorInfo(message=str(error), type="BadRequestError", code=error.status)
            )
        return await create(self, request, *args, **kwargs)

    return checked


def check_async(generate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(generate)
    def checked(self: Any, prompt: Any, sampling_params: Any = None, *args: Any, **kwargs: Any) -> Any:
        listed = kwargs.get("sampling_params_list")
        try:
            for params in _listed(sampling_params if listed is None else listed):
                _check(self, functools.partial(_of_sampling, params, prompt), "extra_args")
        except RequestError as error:
            return _refused(_client_error(error))
        return generate(self, prompt, sampling_params, *args, **kwargs)

    return checked


async def _refused(error: Exception | None) -> AsyncIterator[Any]:
    """Raise as the host's generator would: when the first output is asked for."""
    if error is not None:
        raise error
    yield  # never reached: it makes this a generator


def check_offline(generate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(generate)
    def checked(self: Any, prompts: Any, sampling_params_list: Any = None, *args: Any, **kwargs: Any) -> Any:
        try:
            for params in _listed(sampling_params_list):
                for prompt in _listed(prompts):
                    _check(self, functools.partial(_of_sampling, params, prompt), "extra_args")
        except RequestError as error:
            raise _client_error(error) from None
        return generate(self, prompts, sampling_params_list, *args, **kwargs)

    return checked


def _check(engine: Any, read: Callable[[], Asked], where: str) -> None:
    """Check a request as far as it says itself what it needs.

    Args:
        engine: What would run it.
        read: Returns what it asks for; called only if the engine serves MiniMax-H3.
        where: What holds the extra arguments, as the client typed it.

    Raises:
        RequestError: It cannot be served as it asks.
    """
    config = _config(engine)
    if getattr(config, "model_class_name", None) not in _MODELS:
        return
    asked = read()
    pin = asked.extra.get(PIN)
    if pin is not None:
        check_pin_divides(check_pin(pin, asked.least_rows, f"{where}.{PIN}"), strict_ranks(config), f"{where}.{PIN}")
        return
    buckets = buckets_of(config)
    if buckets is not None and buckets.over == "reject":
        buckets.choose(asked.least_rows)


def _config(engine: Any) -> Any:
    """Return what the engine knows of its diffusion stage; None if it has none."""
    get = getattr(engine, "get_diffusion_od_config", None)
    if not callable(get):  # `Omni`, the synchronous one
        get = getattr(getattr(engine, "engine", None), "get_diffusion_od_config", None)
    return get() if callable(get) else None


def _of_video_request(request: Any) -> Asked:
    params = request.resolve_video_params()
    extra = dict(request.extra_params) if isinstance(request.extra_params, dict) else {}
    if request.seconds is not None:
        extra.setdefault("duration", request.seconds)
    if getattr(request, "aspect_ratio", None) is not None:
        extra.setdefault("aspect_ratio", request.aspect_ratio)
    return Asked(
        extra=extra,
        width=params.width,
        height=params.height,
        frames=params.num_frames,
        images=len(_listed(request.image_reference)),
        media=bool(request.video_reference or request.audio_reference),
    )


def _of_sampling(params: Any, prompt: Any) -> Asked:
    extra = getattr(params, "extra_args", None)
    media = prompt.get("multi_modal_data") if isinstance(prompt, Mapping) else None
    media = media if isinstance(media, Mapping) else {}
    return Asked(
        extra=extra if isinstance(extra, Mapping) else {},
        width=getattr(params, "width", None),
        height=getattr(params, "height", None),
        frames=getattr(params, "num_frames", None),
        images=len(_listed(media.get("image"))),
        media=media.get("video") is not None or media.get("audio") is not None,
    )


def _extras_of_chat(request: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Find the mappings of a chat request in which the host looks for extra arguments."""
    root = getattr(request, "model_extra", None) or {}
    for prefix, holder in (("", root), ("extra_body.", root.get("extra_body"))):
        if isinstance(holder, Mapping):
            for name in ("extra_args", "extra_params"):
                if isinstance(holder.get(name), Mapping):
                    yield f"{prefix}{name}", holder[name]


def _listed(value: Any) -> Sequence[Any]:
    if value is None:
        return ()
    return value if isinstance(value, (list, tuple)) else (value,)


def _client_error(error: RequestError) -> Exception:
    from vllm_omni.errors import OmniClientError

    refusal: Exception = OmniClientError(str(error), status_code=error.status)
    return refusal
