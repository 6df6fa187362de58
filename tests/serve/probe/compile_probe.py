"""Another plugin, for the serve tests: prints what reached the worker, breaks compiled VAE decode and hangs requests.

It is found through PYTHONPATH and loaded by vLLM like any plugin.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import Any

_SETTINGS = {
    "eager": "enforce_eager",
    "granularity": "diffusion_compile_granularity",
    "dynamic": "diffusion_compile_dynamic",
    "vae": "diffusion_compile_vae",
    "config": "diffusion_compile_config",
}


def register() -> None:
    """Wrap `load_model` once; break `torch.compile` for decode if PROBE_BREAK_DECODE is set."""
    from vllm_omni.diffusion.worker.diffusion_model_runner import DiffusionModelRunner

    if getattr(DiffusionModelRunner.load_model, "probed", False):
        return
    DiffusionModelRunner.load_model = _printing(DiffusionModelRunner.load_model)
    if os.environ.get("PROBE_BREAK_DECODE"):
        import torch

        torch.compile = _broken_for_decode(torch.compile)


def _printing(load_model: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(load_model)
    def probed(self: Any, *args: Any, **kwargs: Any) -> None:
        found = ", ".join(f"{name}={getattr(self.od_config, field, None)}" for name, field in _SETTINGS.items())
        print(f"PROBE worker {os.getpid()}: {found}", flush=True)
        load_model(self, *args, **kwargs)
        if os.environ.get("PROBE_HANG_WIDTH"):
            self.pipeline.forward = _hanging(self.pipeline.forward, int(os.environ["PROBE_HANG_WIDTH"]))

    probed.probed = True  # type: ignore[attr-defined]
    return probed


def _hanging(forward: Callable[..., Any], width: int) -> Callable[..., Any]:
    def forward_or_hang(batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch.sampling_params.width == width:
            time.sleep(3600)
        return forward(batch, *args, **kwargs)

    return forward_or_hang


def _broken_for_decode(compile_function: Callable[..., Any]) -> Callable[..., Any]:
    def compile_or_break(model: Any = None, **options: Any) -> Any:
        # Not by the function's name: diffusers decorates its `decode`.
        if "Autoencoder" not in type(getattr(model, "__self__", None)).__name__:
            return compile_function(model, **options)

        def broken(*_: Any, **__: Any) -> Any:
            raise RuntimeError("PROBE broke the compiled decode\nwith a second line")

        return broken

    return compile_or_break
