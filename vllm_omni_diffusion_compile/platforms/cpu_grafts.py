"""The few places where vLLM-Omni and vLLM ask something of a CPU that no platform method answers.

They belong to the CPU platform, not to the compile features, and the platform itself applies them:
`CpuOmniPlatform.init_diffusion_model_runner_runtime`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from vllm.logger import init_logger

from vllm_omni_diffusion_compile.upstream.graft import Graft, graft_module

logger = init_logger(__name__)


def _pack_without_stream(original: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(original)
    def _async_output_loop(self: Any) -> None:
        if torch.accelerator.is_available():
            original(self)
            return
        from vllm_omni.diffusion.data import AsyncDiffusionOutput, AsyncOutputKind
        from vllm_omni.diffusion.ipc import pack_diffusion_output_shm

        # The original's loop but for the copy stream: the tensors are in host memory already, so packing is all there
        # is to do.
        while (item := self._async_output_queue.get()) is not None:
            output, async_output_id, _ = item
            ready = AsyncDiffusionOutput(kind=AsyncOutputKind.OUTPUT_READY, async_output_id=async_output_id)
            try:
                pack_diffusion_output_shm(output)
                ready.output = output
            except Exception as error:
                logger.exception("packing the output %s failed", async_output_id)
                ready.error = f"packing the output into shared memory failed: {error}"
            self._enqueue_result(ready)
            with self._async_output_done:
                self._async_output_pending = max(0, self._async_output_pending - 1)
                self._async_output_done.notify_all()

    return _async_output_loop


def _keep_plain_weight(original: Callable[[Any, bool], None]) -> Callable[[Any, bool], None]:
    @functools.wraps(original)
    def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim == 2 and not layer.weight.is_meta:
            layer.cpu_linear = F.linear
        else:
            original(layer, remove_weight)

    return dispatch_cpu_unquantized_gemm


def _without_pinned_memory(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    @functools.wraps(original)
    def from_od_config(cls: Any, od_config: Any) -> Any:
        config = original(cls, od_config)
        if not torch.accelerator.is_available():
            config.pin_cpu_memory = False
        return config

    return from_od_config


def _nothing_to_empty(original: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(original)
    def empty_cache() -> None:
        if torch.accelerator.is_available():
            original()

    return empty_cache


CPU_GRAFTS: tuple[Graft, ...] = (
    Graft(
        target="vllm_omni.diffusion.worker.diffusion_worker:WorkerProc._async_output_loop",
        make=_pack_without_stream,
        parameters=("self",),
        why="The thread that packs outputs takes its copy stream from torch.accelerator, which is None on CPU: it "
        "dies, and with --distributed-executor-backend mp the server waits for its first output for ever.",
        upstream="none: vLLM-Omni does not claim CPU support",
        remove_when="the loop starts where torch.accelerator.current_accelerator() is None",
    ),
    Graft(
        target="vllm_omni.diffusion.offloader.base:OffloadConfig.from_od_config",
        make=_without_pinned_memory,
        parameters=("cls", "od_config"),
        why="Layerwise offload allocates pinned memory by default, which torch refuses where there is no accelerator "
        "to pin it for.",
        upstream="none: vLLM-Omni does not claim CPU support",
        remove_when="vLLM-Omni asks its platform whether memory can be pinned",
    ),
    Graft(
        target="vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
        make=_keep_plain_weight,
        parameters=("layer", "remove_weight"),
        why="vLLM repacks a linear layer's weight for its own CPU kernels and drops `.weight`. MiniMax-H3's text "
        "encoder slices it, offload moves it, and LoRA adds to it; and its kernels are opaque to torch.compile.",
        upstream="none: right for language models, which never look at `.weight` again",
        remove_when="diffusion layers keep their weight on CPU",
    ),
    Graft(
        target="torch.accelerator:empty_cache",
        make=_nothing_to_empty,
        why="vLLM-Omni's loader, MiniMax-H3's encoder and its VAEs empty the accelerator's cache by torch's name "
        "rather than through the platform when they offload; torch raises where there is no accelerator.",
        upstream="none: vLLM-Omni does not claim CPU support",
        remove_when="those calls go through current_omni_platform.empty_cache()",
    ),
)


def apply_cpu_grafts() -> None:
    """Apply every CPU graft in this process; a second call does nothing.

    Raises:
        GraftError: A target does not look as expected.
    """
    for module, grafts in groupby(CPU_GRAFTS, key=lambda graft: graft.module):
        graft_module(importlib.import_module(module), list(grafts))
