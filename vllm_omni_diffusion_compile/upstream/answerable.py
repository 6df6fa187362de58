"""Which stages can answer a request of ours while they start, to what prompt, and what was declared for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm_omni_diffusion_compile.settings import (
    CONFIG,
    DiffusionCompileConfig,
    PadSeqBuckets,
    Shape,
    WarmupConfig,
    read_config,
)

if TYPE_CHECKING:
    from vllm_omni_diffusion_compile.packed_length.rows import Task

PROMPT = "a photograph of a lighthouse at dusk, waves against the rocks, warm light in the windows"

# They answer an observation of a robot, not a prompt.
_ACTION_MODELS = frozenset(
    {"DreamZeroPipeline", "Gr00tN1d7Pipeline", "InternVLAA1Pipeline", "Pi0Pipeline", "Pi05Pipeline"}
)

# What a model refuses to do without, where a shape does not say it; it decides nothing that is compiled. MiniMax-H3
# makes the picture as wide and high as it was asked for, and wants to be told a ratio all the same.
_EXPECTED_ARGS: Mapping[str, Mapping[str, Any]] = {
    "MiniMaxH3Pipeline": {"aspect_ratio": "16:9"},
    "MiniMaxH3ModularPipeline": {"aspect_ratio": "16:9"},
}


def extra_args(model: str | None, stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `extra_args` of a request to a model: what was stated, and what the model cannot do without."""
    return {**_EXPECTED_ARGS.get(model or "", {}), **stated}


def warmup_of(config: Any) -> WarmupConfig:
    """Return what a stage's configuration says of warmup; nothing, if it is not one that could say anything.

    Where it declares no shapes and has buckets of packed lengths, the shapes are those that have each bucket compiled.
    """
    value = getattr(config, CONFIG, None)
    if not isinstance(value, (Mapping, DiffusionCompileConfig)):
        return WarmupConfig()
    said = read_config(value)
    if said.warmup.shapes or said.pad_seq_buckets is None or not has_packed_length(config):
        return said.warmup
    return said.warmup.model_copy(update={"shapes": list(_bucket_shapes(config, said.pad_seq_buckets))})


def has_packed_length(config: Any) -> bool:
    """Whether a stage serves the model that buckets are for."""
    return str(getattr(config, "model_class_name", "")).startswith("MiniMaxH3")


def _bucket_shapes(config: Any, setting: PadSeqBuckets) -> Iterator[Shape]:
    from vllm_omni_diffusion_compile.packed_length.buckets import Buckets
    from vllm_omni_diffusion_compile.packed_length.warm import IMAGE_SIZE, warm_requests

    for request in warm_requests(Buckets.of(setting), _tasks(config)):
        yield Shape(
            width=request.shape.width,
            height=request.shape.height,
            frames=request.shape.frames,
            steps=request.steps,
            images=[f"{IMAGE_SIZE}x{IMAGE_SIZE}"] * request.images or 0,
            extra_args=request.extra_args,
        )


def _tasks(config: Any) -> tuple[Task, ...]:
    """The tasks that the served partition of MiniMax-H3 answers, as far as each is compiled by itself."""
    folder = str(getattr(config, "model", "")).rstrip("/").rpartition("/")[2].lower()
    if "ref2va" in (folder, str(getattr(config, "task_type", "")).lower()):
        return ("ref2va",)
    # With keyframes a request has a timestep more, which only static shapes compile by itself.
    return ("t2va",) if getattr(config, "diffusion_compile_dynamic", True) is not False else ("t2va", "fl2va")


def why_no_request(config: Any) -> str | None:
    """Return why no prompt can be sent to a stage while it starts; None if one can.

    Args:
        config: Its `OmniDiffusionConfig`.
    """
    model = getattr(config, "model_class_name", None)
    if model in _ACTION_MODELS:
        return f"{model} acts on observations and cannot answer a prompt"
    if _waits_for_upstream(config):
        return "the stage waits for data of an upstream stage"
    if getattr(config, "enable_session_state_manager", False):
        return "the stage needs a session"
    if _one_request_hangs(config):
        return "a single request hangs with distributed layerwise offload over several shards in this release"
    return None


def _waits_for_upstream(config: Any) -> bool:
    omni_kv = getattr(config, "omni_kv_config", None) or {}
    return bool(
        omni_kv.get("need_recv_cache")
        or getattr(config, "kv_transfer_config", None) is not None
        or getattr(config, "stage_input_payload_keys", ())
    )


def _one_request_hangs(config: Any) -> bool:
    """0.28.0 with distributed layerwise offload and more than one shard; 0.30.0 feeds every shard."""
    # The mapping that replaced the flags came with the release that feeds every shard.
    if hasattr(config, "diffusion_offload_config") or not getattr(
        config, "enable_distributed_layerwise_offload", False
    ):
        return False
    parallel = getattr(config, "parallel_config", None)
    shards = max(getattr(parallel, "data_parallel_size", 1) or 1, getattr(parallel, "sequence_parallel_size", 1) or 1)
    return bool(shards > 1)
