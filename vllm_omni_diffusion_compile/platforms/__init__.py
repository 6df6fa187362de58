"""Platforms on which vLLM-Omni itself does not run; independent of the compile features.

`cpu_platform` is the entry point `diffusion_cpu` of `vllm_omni.platform_plugins`. `VLLM_PLUGINS` names it apart from
`diffusion_compile`, so that either works without the other.
"""

from __future__ import annotations


def cpu_platform() -> str | None:
    """Return the class path of the CPU platform where it is the one to use, else None."""
    from vllm_omni_diffusion_compile.platforms.cpu_detection import runs_on_cpu

    return "vllm_omni_diffusion_compile.platforms.cpu.CpuOmniPlatform" if runs_on_cpu() else None
