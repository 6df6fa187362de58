"""What is said and recorded when something compiled becomes eager."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from vllm_omni_diffusion_compile.compile.cpp import why_not
from vllm_omni_diffusion_compile.compile.events import LOG
from vllm_omni_diffusion_compile.compile.latch import Failure, Latch, chain, first_line

# What inductor raises where a machine lacks what it compiles with: nothing else will compile there either.
# Source: torch/_inductor/exc.py.
_NO_COMPILER = frozenset({"InvalidCxxCompiler", "TritonMissing", "GPUTooOldForTriton"})
# What Triton raises, as a RuntimeError, where nothing compiles what launches its kernels.
# Source: triton/runtime/build.py.
_NO_C_COMPILER = "Failed to find C compiler"

# Every latch of this process.
_latches: weakref.WeakSet[Latch] = weakref.WeakSet()


def latch(component: str, region: str, logger: Any, *, raised: bool = False) -> Latch:
    """Return a latch for a region of a component; closing it writes one line and records one event.

    Args:
        component: Path of the component in its pipeline.
        region: Class of the region, or the name of a method.
        logger: The host module's own, so that the line reads as the release's own.
        raised: Whether what closes it fails the request, too; then the error says it all.
    """
    from vllm_omni.diffusion.data import DiffusionRequestAbortedError
    from vllm_omni.errors import OmniClientError

    name = _name(component, region)

    def closed(failure: Failure) -> None:
        if raised:
            return
        if failure.error is None:
            logger.warning(
                "%s failed to compile on rank %s: all ranks run it eagerly until they end.", name, failure.rank,
            )  # fmt: skip
            LOG.record(
                "fallback", component, region,
                error=failure.error_type, reason=f"on rank {failure.rank}: {failure.reason}",
            )  # fmt: skip
            return
        LOG.record("fallback", component, region, error=failure.error_type, reason=failure.reason)
        if failure.elsewhere:
            return
        if _nothing_compiles(failure.error):
            logger.warning(
                "%s: a compiled call failed (%s: %s); disabling compilation and retrying eagerly gave the result. "
                "Nothing can be compiled on this machine: all of the model runs eagerly until the process ends. "
                "Install a compiler that works and restart, or say --enforce-eager.",
                name, failure.error_type, failure.reason,
            )  # fmt: skip
            for other in set(_latches):
                other.close_with(failure)
            return
        logger.warning(
            "%s: a compiled call failed (%s: %s); disabling compilation and retrying eagerly gave the result. "
            "It stays eager until the process ends.",
            name, failure.error_type, failure.reason,
        )  # fmt: skip

    made = Latch(name, closed, passes_through=(DiffusionRequestAbortedError, OmniClientError))
    _latches.add(made)
    return made


def idle() -> list[str]:
    """Name what was set up to be compiled and has compiled nothing so far."""
    return sorted(latch.name for latch in _latches if not latch.graphs and not latch.closed)


def setup_failed(component: str, region: str, logger: Any) -> Callable[[Exception], None]:
    """Return what is told when `torch.compile` itself raised."""

    def report(error: Exception) -> None:
        logger.warning(
            "%s: torch.compile could not be set up (%s: %s); continuing eagerly.",
            _name(component, region), type(error).__name__, first_line(error),
        )  # fmt: skip
        LOG.record("set-up failed", component, region, error=type(error).__name__, reason=first_line(error))

    return report


def _nothing_compiles(error: Exception) -> bool:
    """Whether what the compiler raised for one region it will raise for every other one."""
    for link in chain(error):
        if type(link).__name__ in _NO_COMPILER or _NO_C_COMPILER in str(link):
            return True
        # Either what inductor wrote is wrong, which concerns one region, or the compiler does not work. A disk that is
        # full says neither.
        if type(link).__name__ == "CppCompileError" and "No space left on device" not in str(link):
            return bool(why_not(link.cmd[0]))  # type: ignore[attr-defined]
    return False


def _name(component: str, region: str) -> str:
    return f"{component}.{region}" if component else region
