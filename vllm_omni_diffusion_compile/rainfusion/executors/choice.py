"""Which executor computes, by name or by device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from vllm_omni_diffusion_compile.errors import SettingError
from vllm_omni_diffusion_compile.rainfusion.executors.flash import Flash, takes_head_size, why_not_flash
from vllm_omni_diffusion_compile.rainfusion.executors.flex import Flex
from vllm_omni_diffusion_compile.rainfusion.executors.interface import Executor
from vllm_omni_diffusion_compile.rainfusion.executors.mindie import MindIE
from vllm_omni_diffusion_compile.rainfusion.executors.reference import Reference

_EXECUTORS: Mapping[str, Callable[[], Executor]] = {
    "flash": Flash,
    "flex": Flex,
    "mindie": MindIE,
    "reference": Reference,
}
NAMES = ("auto", *_EXECUTORS)


@functools.cache
def find_executor(name: str, device: str, head_size: int) -> Executor:
    """Return the executor of that name; `auto` is the fastest that runs on the device.

    Args:
        name: One of `NAMES`.
        device: Type of the device: `cuda`, `cpu`, `npu`.
        head_size: Of a head.

    Raises:
        SettingError: There is none of that name.
        DiffusionCompileError: It does not run here.
    """
    if name == "auto":
        name = _fastest(device, head_size)
    if name not in _EXECUTORS:
        raise SettingError(f"found executor {name!r}, expected one of {', '.join(NAMES)}")
    return _EXECUTORS[name]()


def _fastest(device: str, head_size: int) -> str:
    if device == "npu":
        return "mindie"
    if device == "cuda" and takes_head_size(head_size) and why_not_flash() is None:
        return "flash"
    return "flex"
