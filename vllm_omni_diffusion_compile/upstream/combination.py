"""Which combination a configuration of vLLM-Omni is, in the words of a row's key."""

from __future__ import annotations

import enum
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vllm_omni_diffusion_compile.evidence import hardware
from vllm_omni_diffusion_compile.settings import VAE, DiffusionCompileSettings

_NONE = "none"
# Where a configuration keeps what its quantization was before anything was loaded.
_QUANTIZATION = "_diffusion_compile_quantization"
# Objects within objects: configurations of a quantization have one or two levels, and might refer to themselves.
_DEEPEST = 8
# Any head size: which backend it is does not depend on it where one is named, and is the platform's choice elsewhere.
_UNKNOWN_HEAD_SIZE = -1
_DEGREES = {
    "tensor_parallel_size": "tensor",
    "ulysses_degree": "ulysses",
    "ring_degree": "ring",
    "allgather_degree": "allgather",
    "cfg_parallel_size": "cfg",
    "pipeline_parallel_size": "pipeline",
    "data_parallel_size": "data",
    "vae_patch_parallel_size": "vae patch",
    "text_encoder_tp_size": "text encoder",
}


def known_at_start(od_config: Any) -> dict[str, Any]:
    """The fields of a row's key that are known before the first request, and before weights are loaded."""
    settings = DiffusionCompileSettings.of(od_config)
    config = settings.diffusion_compile_config
    eager = bool(getattr(od_config, "enforce_eager", False))
    return {
        "model": str(od_config.model_class_name),
        "execution_mode": "step" if getattr(od_config, "step_execution", False) else "request",
        "capacity": int(getattr(od_config, "max_num_seqs", 1) or 1),
        "attention_backend": _attention(od_config),
        "cache_policy": _cache(od_config),
        "quantization": _quantization(od_config),
        "offload": _offload(od_config),
        "topology": _topology(getattr(od_config, "parallel_config", None)),
        "hardware": hardware(),
        "dtype": str(od_config.dtype).removeprefix("torch."),
        "compiler": _NONE if eager else _compiler(config.backend, config.mode),
        "compile_scope": "eager" if eager else settings.diffusion_compile_granularity,
        "dynamic": None if eager else settings.diffusion_compile_dynamic,
        "vae_policy": _vae_policy(od_config, config, eager=eager),
    }


def _compiler(backend: str, mode: str) -> str:
    name = "inductor" if backend == "auto" else backend
    return name if mode == "default" else f"{name} {mode}"


def _vae_policy(od_config: Any, config: Any, *, eager: bool) -> str:
    if eager or not getattr(od_config, VAE, False):
        return "off"
    if config.vae_policy == "never" or config.vae_scope == "decode":
        return str(config.vae_policy)
    return "blocks"


def _attention(od_config: Any) -> str:
    """Backends, in the order in which roles name them, with the options that decide what they compute."""
    from vllm_omni.diffusion.attention.selector import get_attn_backend_for_role

    attention = getattr(od_config, "diffusion_attention_config", None)
    roles = ["self", *(getattr(attention, "per_role", None) or ())]
    named = []
    for role in dict.fromkeys(roles):
        backend, spec = get_attn_backend_for_role(role, _UNKNOWN_HEAD_SIZE, attention)
        options = (
            {} if spec is None else {name: value for name, value in (spec.backend_kwargs() or {}).items() if value}
        )
        shown = "".join(f", {name} {value}" for name, value in sorted(options.items()))
        named.append(f"{backend.get_name()}{shown}" if role == "self" else f"{role}: {backend.get_name()}{shown}")
    return "; ".join(named)


def _cache(od_config: Any) -> str:
    name = getattr(od_config, "cache_backend", None) or _NONE
    if name == _NONE:
        return _NONE
    configured = getattr(od_config, "cache_config", None)
    options = configured if isinstance(configured, Mapping) else vars(configured) if configured is not None else {}
    return f"{name} {_short(options)}"


def _quantization(od_config: Any) -> str:
    found = getattr(od_config, "quantization_config", None)
    if found is None:
        return _NONE
    return str(getattr(od_config, _QUANTIZATION, None) or _described(found))


def remember_quantization(od_config: Any) -> None:
    """Describe quantization as it was configured: loading weights writes into it which kernels were chosen."""
    found = getattr(od_config, "quantization_config", None)
    if found is not None and not hasattr(od_config, _QUANTIZATION):
        setattr(od_config, _QUANTIZATION, _described(found))


def _described(quantization: Any) -> str:
    """Name the method, and what decides its result: bits, layers that are left out, and so on."""
    name = quantization.get_name() if callable(getattr(quantization, "get_name", None)) else type(quantization).__name__
    return f"{name} {_short(_plain(quantization))}"


def _plain(value: Any, depth: int = 0) -> Any:
    """Plain values for what an object was made of, the same in every process."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(item, depth + 1) for name, item in value.items()} if depth < _DEEPEST else {}
    if isinstance(value, (list, tuple)):
        return [_plain(item, depth + 1) for item in value] if depth < _DEEPEST else []
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, type) or callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    if isinstance(value, (torch.dtype, enum.Enum, re.Pattern)):
        return str(value)
    inside = getattr(value, "__dict__", {}) if depth < _DEEPEST else {}
    return {"": type(value).__qualname__} | {name: _plain(item, depth + 1) for name, item in inside.items()}


def _offload(od_config: Any) -> str:
    if getattr(od_config, "enable_distributed_layerwise_offload", False):
        return "distributed layerwise"
    if getattr(od_config, "enable_layerwise_offload", False):
        return "layerwise"
    if getattr(od_config, "diffusion_offload_config", None):
        return f"configured {_short(od_config.diffusion_offload_config)}"
    return "cpu" if getattr(od_config, "enable_cpu_offload", False) else _NONE


def _topology(parallel: Any) -> str:
    degrees = {word: getattr(parallel, name, None) or 1 for name, word in _DEGREES.items()}
    world = int(getattr(parallel, "world_size", 1) or 1)
    used = [f"{word} {degree}" for word, degree in degrees.items() if degree > 1]
    if getattr(parallel, "use_hsdp", False):
        used.append("HSDP")
    devices = f"{world} device" + "s" * (world > 1)
    return f"{devices}: {', '.join(used)}" if used else devices


def _short(options: Any) -> str:
    return hashlib.sha256(json.dumps(options, sort_keys=True, default=str).encode()).hexdigest()[:8]


def checkpoint_folder(model: str, revision: str | None = None) -> Path | None:
    """Return where the files of a checkpoint lie on this machine; None if they are not here."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return None
