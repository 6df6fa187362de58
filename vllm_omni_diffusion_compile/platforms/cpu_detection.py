"""Says whether the CPU platform is the one to use."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from vllm.logger import init_logger

logger = init_logger(__name__)


def runs_on_cpu() -> bool:
    """Return whether vLLM runs on CPU and vLLM-Omni sees no accelerator of its own.

    Both matter. vLLM-Omni prefers any out-of-tree platform over its built-in ones, so answering on a machine with an
    accelerator would take it away there; and where vLLM itself does not run on CPU the platform has no base to stand
    on.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    from vllm_omni.platforms import builtin_omni_platform_plugins

    active = active_platforms(builtin_omni_platform_plugins)
    if active:
        logger.info("vLLM runs on CPU, but vLLM-Omni finds %s: leaving the platform to it", ", ".join(active))
    return not active


def active_platforms(detectors: Mapping[str, Callable[[], str | None]]) -> list[str]:
    """Return the names of the detectors that answer.

    Args:
        detectors: vLLM-Omni's detectors by name; each returns the class path of its platform, or None.
    """
    active = []
    for name, detect in detectors.items():
        try:
            path = detect()
        except Exception:
            # As vLLM-Omni has it: a detector that fails has not found its platform.
            logger.debug("detector %s of vLLM-Omni failed", name, exc_info=True)
            continue
        if path is not None:
            active.append(name)
    return active
