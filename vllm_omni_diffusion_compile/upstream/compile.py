"""`compile_callable_with_fallback` of `vllm_omni.diffusion.compile`, by name and messages as in pull request 6010."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from vllm_omni_diffusion_compile.upstream.shutdown import told_to_stop


def add_compile_callable(_: None) -> Callable[..., tuple[Callable[..., Any], bool]]:
    return compile_callable_with_fallback


def compile_callable_with_fallback(
    fn: Callable[..., Any], *, label: str, **compile_options: Any
) -> tuple[Callable[..., Any], bool]:
    """Compile a callable that falls back to eager when the compiler fails.

    Args:
        fn: What to compile.
        label: How the log names it.
        **compile_options: Handed to `torch.compile`.

    Returns:
        The callable to use, and whether it is compiled. If setting up failed, `fn` itself and False.
    """
    from vllm_omni.diffusion.data import DiffusionRequestAbortedError
    from vllm_omni.errors import OmniClientError

    from vllm_omni_diffusion_compile.compile.fallback import compile_with_fallback, first_line

    # The host module's own logger, so that the lines read as the release's own will.
    logger = sys.modules["vllm_omni.diffusion.compile"].logger

    def setup_failed(error: Exception) -> None:
        logger.warning(
            "%s: torch.compile could not be set up (%s: %s); continuing eagerly.",
            label,
            type(error).__name__,
            first_line(error),
        )

    def fell_back(error: Exception) -> None:
        logger.warning(
            "%s: a compiled call failed (%s: %s); disabling compilation and retrying eagerly gave the result. "
            "It stays eager until the process ends.",
            label, type(error).__name__, first_line(error),
        )  # fmt: skip

    return compile_with_fallback(
        fn,
        on_setup_failure=setup_failed,
        on_fallback=fell_back,
        passes_through=(DiffusionRequestAbortedError, OmniClientError),
        hold=told_to_stop,  # the first compilation takes longest, and would delay a stop during start-up
        **compile_options,
    )
