"""Inductor's compile workers, started while there is something else to wait for."""

from __future__ import annotations

import importlib

import torch


def start_workers() -> str:
    """Load inductor and start the processes that compile Triton kernels; returns without waiting for them.

    Torch does both when the first graph reaches inductor, and compiles that graph's kernels one after the other in this
    process until the workers answer, seconds later. Started while weights are loaded, they are there for the first
    graph. `TORCH_WARM_POOL=0` keeps torch from starting them early, here as elsewhere.

    Returns:
        Why nothing was started; else an empty text.

    Source: `torch._inductor.async_compile.maybe_warm_pool`, which torch calls when a graph reaches inductor.
    """
    if not torch.accelerator.is_available():
        return "nothing is compiled by Triton without an accelerator"
    try:
        importlib.import_module("torch._inductor.compile_fx")
        start = importlib.import_module("torch._inductor.async_compile").maybe_warm_pool
    except (ImportError, AttributeError) as error:
        return f"this torch has no compile workers to start ({type(error).__name__}: {error})"
    try:
        start()
    except (OSError, RuntimeError) as error:
        return f"the compile workers did not start ({type(error).__name__}: {error}); torch will try again"
    return ""
