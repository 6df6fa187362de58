"""MiniMax-H3's packed length in the worker: pinned by the request, or chosen from the server's buckets.

A request is looked at before anything of it is encoded; its rows are known only when it is packed. So the pipeline's
two entries (one for whole requests, one for steps) leave what holds for the request in a context variable, and the two
packers look there. Without a pin and without buckets nothing is left there, and the packers are the release's.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vllm_omni_diffusion_compile.errors import RequestError
from vllm_omni_diffusion_compile.packed_length.buckets import PIN, Buckets, check_pin, check_pin_holds
from vllm_omni_diffusion_compile.packed_length.rows import rows_of_latents
from vllm_omni_diffusion_compile.upstream.buckets import buckets_of, strict_ranks

_PIPELINE = "vllm_omni.diffusion.models.minimax_h3.pipeline_minimax_h3"
# On a pipeline: its buckets, if it has any. On an error that the client is answered with: that it is one of ours.
_POLICY = "_diffusion_compile_packing"
_REFUSED = "_diffusion_compile_refused"
# What the packer of 0.28.0, which takes no length, puts into the rows of padding.
_PADDING = {
    "input_ids": -1,
    "image_mask": 0,
    "audio_mask": 0,
    "img_position_ids": 0,
    "token_tags": -1,
    "document_id": 1,
}


@dataclass
class _Policy:
    """The buckets of a pipeline, and whether a request that none of them holds was already spoken of."""

    buckets: Buckets
    warned: bool = False


@dataclass(frozen=True)
class _Packing:
    """What holds for the request that is being packed."""

    pin: int | None
    policy: _Policy | None


_packing: contextvars.ContextVar[_Packing | None] = contextvars.ContextVar("minimax_h3_packing", default=None)


def read_buckets(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        od_config = kwargs.get("od_config", args[0] if args else None)
        buckets = buckets_of(od_config)
        if buckets is not None:
            buckets.refuse_indivisible(strict_ranks(od_config))
        init(self, *args, **kwargs)
        # A module of torch takes plain attributes once it is initialised.
        setattr(self, _POLICY, None if buckets is None else _Policy(buckets))

    return __init__


def hold_for_request(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def with_packing(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        with _held(self, getattr(request, "sampling_params", None)):
            return forward(self, request, *args, **kwargs)

    return with_packing


def hold_for_steps(prepare_encode: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(prepare_encode)
    def with_packing(self: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        with _held(self, getattr(state, "sampling", None)):
            return prepare_encode(self, state, *args, **kwargs)

    return with_packing


@contextmanager
def _held(pipeline: Any, sampling: Any) -> Iterator[None]:
    pin = (getattr(sampling, "extra_args", None) or {}).get(PIN)
    policy: _Policy | None = getattr(pipeline, _POLICY, None)
    if pin is None and policy is None:
        yield
        return
    with _refusals():
        checked = None if pin is None else check_pin(pin)
    token = _packing.set(_Packing(checked, policy))
    try:
        yield
    finally:
        _packing.reset(token)


def pad_packed(pack: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    takes_length = "seq_len" in inspect.signature(pack).parameters

    @functools.wraps(pack)
    def with_length(**kwargs: Any) -> dict[str, Any]:
        packing = _packing.get()
        if packing is None:
            return pack(**kwargs)
        used = rows_of_latents(
            **{name: kwargs[name] for name in ("text_len", "latent_t", "latent_h", "latent_w", "audio_t")},
            keyframes=len(kwargs.get("keyframe_frame_indices") or ()),
            ref_blocks=kwargs.get("ref_blocks") or (),
        )
        length, said = _length(packing, used)
        packed = pack(**{**kwargs, "seq_len": length}) if takes_length else _extended(pack(**kwargs), length)
        if packing.pin is None or not _release_logs_pins():
            task = "ref2va" if "ref_blocks" in kwargs else "fl2va" if kwargs.get("include_keyframe_cond") else "t2va"
            _logger().info(
                "MiniMax H3 packed sequence: task=%s pad_seq_len=%s used=%d seq_len=%d",
                task, said, int(packed["cu_seqlens"][1]), int(packed["seq_len"]),
            )  # fmt: skip
        return packed

    return with_length


def _length(packing: _Packing, used: int) -> tuple[int, int | None]:
    """Return the packed length, and the same unless it is only what the release would have padded to."""
    with _refusals():
        if packing.pin is not None:
            check_pin_holds(packing.pin, used)
            return packing.pin, packing.pin
        policy = packing.policy
        assert policy is not None, "held for nothing"
        choice = policy.buckets.choose(used)
    if choice.over and not policy.warned:
        policy.warned = True
        _logger().warning(
            "A request of %d rows is longer than every bucket of pad_seq_buckets (the longest is %d) and was padded to "
            "%d, a length of its own; add %d to pad_seq_buckets if there are more like it. Further ones are not named.",
            used, policy.buckets.lengths[-1], choice.length, choice.length,
        )  # fmt: skip
    return choice.length, None if choice.over else choice.length


def _extended(packed: dict[str, Any], length: int) -> dict[str, Any]:
    """Add rows of padding to what 0.28.0's packer of T2VA and FL2VA has made, which takes no length."""
    import torch

    more = length - int(packed["seq_len"])
    for name, value in _PADDING.items():
        rows = packed[name]
        packed[name] = torch.cat([rows, rows.new_full((more, *rows.shape[1:]), value)])
    packed["cu_seqlens"][2] = length
    packed["seq_len"] = torch.tensor(length)
    return packed


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn what is wrong with a request into the host's error for its client."""
    try:
        yield
    except RequestError as error:
        from vllm_omni.errors import OmniClientError

        refusal = OmniClientError(str(error), status_code=error.status)
        setattr(refusal, _REFUSED, True)
        raise refusal from None


def answer_refusals(execute_model: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(execute_model)
    def with_refusals(self: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm_omni.errors import OmniClientError

        try:
            return execute_model(self, *args, **kwargs)
        except OmniClientError as error:
            if not hasattr(error, _REFUSED):
                raise
            from vllm_omni.diffusion.data import DiffusionOutput

            return DiffusionOutput.from_exception(error)

    return with_refusals


def _release_logs_pins() -> bool:
    """Whether the release knows pins itself, and says what became of one."""
    return PIN in inspect.signature(sys.modules[_PIPELINE].MiniMaxH3Pipeline.diffuse).parameters


def _logger() -> Any:
    return sys.modules[_PIPELINE].logger
