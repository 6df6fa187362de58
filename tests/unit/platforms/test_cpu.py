"""What the CPU platform answers, and what its grafts do, without a server."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from queue import Queue
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("vllm_omni", reason="the platform is a subclass of vLLM-Omni's")

from vllm_omni_diffusion_compile.platforms import cpu_memory
from vllm_omni_diffusion_compile.platforms.cpu import CpuOmniPlatform
from vllm_omni_diffusion_compile.platforms.cpu_attention import CpuSDPABackend
from vllm_omni_diffusion_compile.platforms.cpu_grafts import CPU_GRAFTS, apply_cpu_grafts
from vllm_omni_diffusion_compile.upstream.graft import applied, undo

# Everything that vLLM-Omni's diffusion code calls on its platform; vLLM answers None for what is missing, and the call
# then fails.
CALLED = [
    "Event",
    "Stream",
    "current_device",
    "current_stream",
    "empty_cache",
    "get_current_memory_usage",
    "get_device_capability",
    "get_device_count",
    "get_device_memory",
    "get_device_name",
    "get_device_total_memory",
    "get_free_memory",
    "get_torch_device",
    "is_available",
    "is_initialized",
    "max_memory_allocated",
    "max_memory_reserved",
    "memory_allocated",
    "memory_reserved",
    "record_device_event",
    "reset_peak_memory_stats",
    "set_device",
    "stream",
    "supports_cpu_offload",
    "supports_float64",
    "supports_torch_inductor",
    "synchronize",
]


@pytest.fixture
def grafts() -> Iterator[None]:
    apply_cpu_grafts()
    yield
    undo(CPU_GRAFTS)


@pytest.mark.parametrize("name", CALLED)
def test_nothing_that_is_called_is_missing(name: str) -> None:
    assert callable(getattr(CpuOmniPlatform(), name))


def test_it_is_the_cpu_and_no_accelerator() -> None:
    platform = CpuOmniPlatform()
    assert platform.is_cpu()
    assert platform.is_out_of_tree()
    assert not any((platform.is_cuda(), platform.is_rocm(), platform.is_npu(), platform.is_xpu(), platform.is_musa()))
    assert platform.get_torch_device(1) == torch.device("cpu")
    assert platform.dist_backend == "gloo"


@pytest.mark.parametrize("backend", [None, "TORCH_SDPA", "torch_sdpa"])
def test_sdpa_is_the_backend(backend: str | None) -> None:
    path = CpuOmniPlatform.get_diffusion_attn_backend_cls(backend, head_size=64)
    assert path == f"{CpuSDPABackend.__module__}.{CpuSDPABackend.__qualname__}"


def test_another_backend_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"FLASH_ATTN.*TORCH_SDPA"):
        CpuOmniPlatform.get_diffusion_attn_backend_cls("FLASH_ATTN", head_size=64)


@pytest.mark.parametrize(
    "answer", [CpuOmniPlatform.get_omni_ar_worker_cls, CpuOmniPlatform.get_omni_generation_worker_cls]
)
def test_language_model_stages_are_refused(answer: Any) -> None:
    with pytest.raises(NotImplementedError, match="diffusion stages only"):
        answer()


def test_memory_figures_are_those_of_the_machine() -> None:
    free, total = CpuOmniPlatform.get_device_memory()
    assert total == psutil.virtual_memory().total
    assert 0 < free <= total
    assert abs(CpuOmniPlatform.memory_reserved() - psutil.Process().memory_info().rss) < 64 << 20


def test_the_peak_sees_what_was_freed_again() -> None:
    size = 256 << 20
    CpuOmniPlatform.reset_peak_memory_stats()
    before = CpuOmniPlatform.max_memory_reserved()
    # From the C allocator, written to and given back: nothing of it is resident afterwards.
    block = ctypes.create_string_buffer(size)
    ctypes.memset(block, 1, size)
    del block
    assert CpuOmniPlatform.max_memory_reserved() - before > size // 2


def test_a_reset_forgets_an_earlier_peak() -> None:
    block = ctypes.create_string_buffer(256 << 20)
    ctypes.memset(block, 1, 256 << 20)
    high = cpu_memory.peak_bytes()
    del block
    if not cpu_memory.reset_peak():
        pytest.skip("this kernel does not reset the peak")
    assert cpu_memory.peak_bytes() < high - (128 << 20)


def test_without_proc_the_peak_is_that_of_the_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(cpu_memory, "_STATUS", tmp_path / "status")
    monkeypatch.setattr(cpu_memory, "_CLEAR_REFS", tmp_path / "missing" / "clear_refs")
    assert not cpu_memory.reset_peak()
    assert cpu_memory.peak_bytes() > 64 << 20


@pytest.mark.parametrize("key_heads", [4, 2])
def test_attention_is_exact(key_heads: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 33, 4, 16)
    key, value = torch.randn(2, 2, 33, key_heads, 16).unbind(0)
    implementation = CpuSDPABackend.get_impl_cls()(num_heads=4, head_size=16, softmax_scale=0.25)
    repeated = [x.repeat_interleave(4 // key_heads, dim=2).transpose(1, 2) for x in (key, value)]
    scores = query.transpose(1, 2) @ repeated[0].transpose(2, 3) * 0.25
    expected = (scores.softmax(-1) @ repeated[1]).transpose(1, 2)
    torch.testing.assert_close(implementation.forward(query, key, value), expected)


def test_every_graft_applies_and_goes_again() -> None:
    apply_cpu_grafts()
    assert all(applied(graft) for graft in CPU_GRAFTS)
    apply_cpu_grafts()
    undo(CPU_GRAFTS)
    assert not any(applied(graft) for graft in CPU_GRAFTS)


@pytest.mark.usefixtures("grafts")
def test_a_linear_layer_keeps_its_weight() -> None:
    from vllm.model_executor.layers import utils

    layer = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    before = layer.weight
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    assert layer.weight is before
    assert layer.cpu_linear is F.linear


@pytest.mark.usefixtures("grafts")
def test_offload_does_not_pin_memory() -> None:
    from vllm_omni.diffusion.data import OmniDiffusionConfig
    from vllm_omni.diffusion.offloader.base import OffloadConfig

    config = OmniDiffusionConfig(model="unused", enable_layerwise_offload=True)
    assert config.pin_cpu_memory
    assert not OffloadConfig.from_od_config(config).pin_cpu_memory


def _output_thread(outputs: list[Any]) -> tuple[list[Any], int]:
    """Run the worker's output loop over some outputs; returns its messages and how many it still owes."""
    from vllm_omni.diffusion.worker.diffusion_worker import WorkerProc

    messages: list[Any] = []
    worker = SimpleNamespace(
        gpu_id=0,
        _async_output_queue=Queue(),
        _async_output_done=threading.Condition(),
        _async_output_pending=len(outputs),
        _enqueue_result=messages.append,
    )
    for index, output in enumerate(outputs):
        worker._async_output_queue.put((output, str(index), None))
    worker._async_output_queue.put(None)
    WorkerProc._async_output_loop(worker)
    return messages, worker._async_output_pending


@pytest.mark.usefixtures("grafts")
def test_outputs_are_packed_and_sent() -> None:
    from vllm_omni.diffusion.data import AsyncOutputKind, DiffusionOutput
    from vllm_omni.diffusion.ipc import unpack_diffusion_output_shm

    picture = torch.rand(1, 3, 512, 512)
    messages, pending = _output_thread([DiffusionOutput(output=picture.clone())])
    assert pending == 0
    (message,) = messages
    assert message.kind is AsyncOutputKind.OUTPUT_READY
    assert (message.async_output_id, message.error) == ("0", None)
    unpack_diffusion_output_shm(message.output)
    torch.testing.assert_close(message.output.output, picture)


@pytest.mark.usefixtures("grafts")
def test_an_output_that_cannot_be_packed_is_an_error_and_not_a_dead_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_omni.diffusion import ipc

    def fail(output: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(ipc, "pack_diffusion_output_shm", fail)
    messages, pending = _output_thread([object(), object()])
    assert pending == 0
    assert [message.output for message in messages] == [None, None]
    assert all("no space left on device" in message.error for message in messages)
