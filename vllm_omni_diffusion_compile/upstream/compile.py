"""`compile_callable_with_fallback` of `vllm_omni.diffusion.compile`, by name and messages as in pull request 6010."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from vllm_omni_diffusion_compile.upstream import fallbacks
from vllm_omni_diffusion_compile.upstream.shutdown import told_to_stop


def add_compile_callable(_: None) -> Callable[..., tuple[Callable[..., Any], bool]]:
    return compile_callable_with_fallback


def compile_callable_with_fallback(
    fn: Callable[..., Any], *, label: str, fails_closed: bool = False, **compile_options: Any
) -> tuple[Callable[..., Any], bool]:
    """Compile a callable that falls back to eager when the compiler fails.

    Args:
        fn: What to compile.
        label: How the log names it.
        fails_closed: Raise what a compiled call, or setting it up, raises.
        **compile_options: Handed to `torch.compile`.

    Returns:
        The callable to use, and whether it is compiled. If setting up failed, `fn` itself and False.
    """
    from vllm_omni_diffusion_compile.compile.events import recorder
    from vllm_omni_diffusion_compile.compile.fallback import compile_with_fallback

    # The host module's own logger, so that the lines read as the release's own will.
    logger = sys.modules["vllm_omni.diffusion.compile"].logger
    component, _, region = label.rpartition(".")
    return compile_with_fallback(
        fn,
        fallbacks.latch(component, region, logger),
        on_setup_failure=fallbacks.setup_failed(component, region, logger),
        on_compile=recorder(component, region),
        hold=told_to_stop,  # the first compilation takes longest, and would delay a stop during start-up
        fails_closed=fails_closed,
        compile_options=compile_options,
    )
