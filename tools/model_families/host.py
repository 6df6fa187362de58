"""The host's own surroundings of a model on one rank, as its worker sets them up.

The device is torch's default one: CPU, unless `torch.set_default_device` says something else.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tools.model_families.family import Family


@contextmanager
def host(dtype: torch.dtype, tf_model_config: Any = None, model_class_name: str = "") -> Iterator[Any]:
    """Everything a model asks for while it is built and while it runs.

    Args:
        dtype: The data type that the server was started with.
        tf_model_config: The transformer's configuration file.
        model_class_name: The pipeline's name.

    Yields:
        The `OmniDiffusionConfig`.
    """
    from vllm.config import set_current_vllm_config
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm_omni.diffusion.config import set_current_diffusion_config
    from vllm_omni.diffusion.data import OmniDiffusionConfig, TransformerConfig
    from vllm_omni.diffusion.forward_context import set_forward_context
    from vllm_omni.diffusion.vllm_config import create_diffusion_vllm_config

    device = torch.get_default_device()
    if device.type == "cpu":
        from vllm_omni_diffusion_compile.platforms.cpu_grafts import apply_cpu_grafts

        apply_cpu_grafts()
    od_config = OmniDiffusionConfig(model="", dtype=dtype, num_gpus=1)
    od_config.model_class_name = model_class_name
    if tf_model_config is not None:
        od_config.tf_model_config = TransformerConfig.from_dict(dict(tf_model_config))
    vllm_config = create_diffusion_vllm_config(device, od_config)
    with (
        set_current_vllm_config(vllm_config),
        set_forward_context(vllm_config=vllm_config, omni_diffusion_config=od_config),
        set_current_diffusion_config(od_config),
        set_default_torch_dtype(dtype),
    ):
        _one_rank()
        yield od_config


def _one_rank() -> None:
    from vllm_omni.diffusion.distributed import parallel_state

    if torch.distributed.is_initialized():
        return
    os.environ.update(MASTER_ADDR="localhost", LOCAL_RANK="0", RANK="0", WORLD_SIZE="1")
    os.environ.setdefault("MASTER_PORT", "0")
    on_cpu = torch.get_default_device().type == "cpu"
    parallel_state.init_distributed_environment(
        world_size=1, rank=0, distributed_init_method="tcp://localhost:0", backend="gloo" if on_cpu else "nccl"
    )
    parallel_state.initialize_model_parallel()


def build(family: Family, od_config: Any) -> torch.nn.Module:
    """Build a family's component inside `host` and fill its weights."""
    with torch.device("meta") if family.meta else torch.get_default_device():
        component: torch.nn.Module = family.build(od_config).eval().requires_grad_(False)
    if not family.meta:
        fill(component)
        _process_weights(component)
    return component


def fill(module: torch.nn.Module) -> None:
    """Fill every parameter from a seed of its own name, in numbers that bf16 can represent.

    Matrices keep the scale of what they are given, scales lie around one, and biases and tables around zero, so that
    a deep stack stays finite and each layer matters.
    """
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")
            generator = torch.Generator().manual_seed(seed)
            numbers = torch.randn(parameter.shape, generator=generator, dtype=torch.float32, device="cpu")
            if parameter.ndim >= 2:
                numbers = numbers / max(1, parameter[0].numel()) ** 0.5
            elif name.rpartition(".")[2] == "weight":
                numbers = 1 + 0.1 * numbers
            else:
                numbers = 0.1 * numbers
            parameter.copy_(numbers.to(torch.bfloat16))


def _process_weights(module: torch.nn.Module) -> None:
    """Do what the host's loader does after it has loaded weights."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    for part in module.modules():
        if (fallback := getattr(part, "sdpa_fallback", None)) is not None:
            # What our CPU platform's backend does, for the models that pick this implementation past the backend.
            fallback.forward = fallback.forward_cuda
        method = getattr(part, "quant_method", None)
        if isinstance(method, QuantizeMethodBase):
            method.process_weights_after_loading(part)
