"""Requests that warm the buckets."""

from __future__ import annotations

from vllm_omni_diffusion_compile.packed_length.buckets import Buckets, check_pin
from vllm_omni_diffusion_compile.packed_length.known import Asked
from vllm_omni_diffusion_compile.packed_length.warm import warm_requests

BUCKETS = Buckets((64, 640, 1024, 16_384, 54_080))


def test_every_bucket_that_a_request_can_get_is_pinned_once_a_task() -> None:
    requests = warm_requests(BUCKETS, ("t2va", "fl2va", "ref2va"))
    lengths = {task: [r.length for r in requests if r.shape.task == task] for task in ("t2va", "fl2va", "ref2va")}
    assert lengths == {
        "t2va": [54_080, 16_384, 1024, 640],
        "fl2va": [54_080, 16_384, 1024],
        "ref2va": [54_080, 16_384],
    }


def test_each_passes_the_check_that_a_users_request_has_to_pass() -> None:
    for request in warm_requests(BUCKETS, ("t2va", "fl2va", "ref2va")):
        shape = request.shape
        asked = Asked(
            extra=request.extra_args, width=shape.width, height=shape.height, frames=shape.frames, images=request.images
        )
        assert check_pin(request.extra_args["pad_seq_len"], asked.least_rows) == request.length
        assert request.steps > 1, "one step has fewer timesteps than the others"
