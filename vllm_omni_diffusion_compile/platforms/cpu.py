"""vLLM-Omni's diffusion stages on machines without an accelerator."""

from __future__ import annotations

from typing import Any

import psutil
import torch
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.diffusion.attention.backends.registry import DiffusionAttentionBackendEnum
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

from vllm_omni_diffusion_compile.platforms.cpu_memory import peak_bytes, reset_peak, resident_bytes

_DENSE, _SPARSE = "TORCH_SDPA", "RAINFUSION_ATTN"
_ATTENTION_BACKEND = "vllm_omni_diffusion_compile.platforms.cpu_attention.CpuSDPABackend"


class CpuOmniPlatform(OmniPlatform, CpuPlatform):  # type: ignore[misc]
    """What vLLM's CPU platform knows, and what vLLM-Omni asks beyond it.

    vLLM answers None for a method that neither a platform nor `torch.cpu` has, and callers call that None: everything
    that vLLM-Omni's diffusion code calls is therefore defined here. Streams and events are `torch.cpu`'s, whose work is
    always done.

    Language-model stages need a worker that vLLM-Omni does not have for CPU; `get_omni_ar_worker_cls` and its sibling
    say so.
    """

    _omni_enum = OmniPlatformEnum.OOT

    @classmethod
    def get_diffusion_attn_backend_cls(
        cls, selected_backend: str | None, head_size: int, allow_trtllm_default: bool = False
    ) -> str:
        """Return the class path of a backend that runs here.

        Raises:
            ValueError: Another backend was asked for.
        """
        selected = (selected_backend or _DENSE).upper()
        if selected == _SPARSE and cls._sparse_backend_runs():
            path: str = DiffusionAttentionBackendEnum[selected].get_path()
            return path
        if selected != _DENSE:
            raise ValueError(
                f"found diffusion attention backend {selected_backend}, expected {_DENSE} or {_SPARSE}: no other one "
                "runs on CPU, and the second one only with the plugin diffusion_compile; set it, or leave the option "
                "out"
            )
        return _ATTENTION_BACKEND

    @classmethod
    def _sparse_backend_runs(cls) -> bool:
        """Whether something made vLLM-Omni's backend for NPUs run here; vLLM-Omni says so of its backends itself."""
        try:
            cls.validate_diffusion_attn_backend(_SPARSE)
        except ValueError:
            return False
        return True

    @classmethod
    def init_diffusion_model_runner_runtime(cls, vllm_config: Any, od_config: Any, device: torch.device) -> None:
        """Apply the CPU grafts: this runs in the worker's process, before it loads weights and starts threads."""
        from vllm_omni_diffusion_compile.platforms.cpu_grafts import apply_cpu_grafts

        apply_cpu_grafts()

    @classmethod
    def get_omni_ar_worker_cls(cls) -> str:
        """Refuse: vLLM-Omni's autoregressive workers are written for accelerators."""
        raise _no_language_model("autoregressive")

    @classmethod
    def get_omni_generation_worker_cls(cls) -> str:
        """Refuse: vLLM-Omni's generation workers are written for accelerators."""
        raise _no_language_model("generation")

    @classmethod
    def get_default_stage_config_path(cls) -> str:
        return "vllm_omni/deploy"

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        """Inductor generates C++ here; whether a compiler works is found out where something is compiled."""
        return True

    @classmethod
    def supports_diffusion_dense_flash_attention(cls) -> bool:
        return False

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        return 1

    @classmethod
    def get_device_version(cls) -> str | None:
        return None

    @classmethod
    def synchronize(cls) -> None:
        return None

    @classmethod
    def get_free_memory(cls, device: torch.device | None = None) -> int:
        """Bytes that can be taken without swapping."""
        return int(psutil.virtual_memory().available)

    @classmethod
    def get_device_memory(cls, device: torch.device | None = None) -> tuple[int, int]:
        """Available and total bytes of the machine."""
        memory = psutil.virtual_memory()
        return int(memory.available), int(memory.total)

    @classmethod
    def empty_cache(cls) -> None:
        """There is no caching allocator to empty."""
        return

    @classmethod
    def memory_reserved(cls, device: torch.device | int | None = None) -> int:
        """Resident bytes of the process: without a caching allocator, reserved and allocated are the same."""
        return resident_bytes()

    @classmethod
    def memory_allocated(cls, device: torch.device | int | None = None) -> int:
        return resident_bytes()

    @classmethod
    def get_current_memory_usage(cls, device: torch.device | None = None) -> float:
        return float(resident_bytes())

    @classmethod
    def reset_peak_memory_stats(cls, device: torch.device | int | None = None) -> None:
        reset_peak()

    @classmethod
    def max_memory_reserved(cls, device: torch.device | int | None = None) -> int:
        """Peak resident bytes since `reset_peak_memory_stats`, where the kernel can reset its peak."""
        return peak_bytes()

    @classmethod
    def max_memory_allocated(cls, device: torch.device | int | None = None) -> int:
        return peak_bytes()


def _no_language_model(kind: str) -> NotImplementedError:
    return NotImplementedError(
        f"found a stage that needs vLLM-Omni's {kind} worker, expected diffusion stages only: "
        "that worker does not run on CPU; serve this model on an accelerator"
    )
