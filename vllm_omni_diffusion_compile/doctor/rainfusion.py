"""What `RAINFUSION_ATTN` would compute with."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_omni_diffusion_compile.doctor.finding import Finding
from vllm_omni_diffusion_compile.doctor.versions import is_there, release_of
from vllm_omni_diffusion_compile.errors import DiffusionCompileError
from vllm_omni_diffusion_compile.rainfusion.executors import find_executor
from vllm_omni_diffusion_compile.rainfusion.executors.mindie import PROMOTES_TAILS, why_not_mindie

# Of every video model that vLLM-Omni serves with it.
_HEAD_SIZE = 128
_INSTALL = "install MindIE-SD 3.1.0 (https://gitcode.com/Ascend/MindIE-SD)"


def check_rainfusion(device: str, *, executor: str = "auto", selected: bool = False) -> Iterator[Finding]:
    """Check the executor that is named, or that the device gets, and MindIE-SD.

    Args:
        device: Type of the device: `cuda`, `cpu`, `npu`.
        executor: The key `rainfusion_executor`.
        selected: `RAINFUSION_ATTN` is the attention backend of the command line that is checked.
    """
    yield _executor(device, executor, selected=selected)
    yield _mindie(device)


def _executor(device: str, executor: str, *, selected: bool) -> Finding:
    name = "RAINFUSION_ATTN executor"
    try:
        found = find_executor(executor, device, _HEAD_SIZE)
    except DiffusionCompileError as error:
        return Finding(
            name=name, state="broken" if selected and (executor != "auto" or not is_there("mindiesd")) else "limit",
            found=f"{executor} does not run on {device}: {error}",
            remedy="do as it says, or choose another attention backend"
            if selected
            else "do as it says before you choose RAINFUSION_ATTN; without it, nothing is missing",
        )  # fmt: skip
    return Finding.ok(name, f"{found.name} on {device} (rainfusion_executor: {executor})")


def _mindie(device: str) -> Finding:
    name = "MindIE-SD"
    if not is_there("mindiesd"):
        if device != "npu":
            return Finding.ok(name, f"not installed, and not needed on {device}")
        return Finding.limit(
            name, "not installed: no RAINFUSION_ATTN on Ascend NPU", f"{_INSTALL}; other attention backends need none"
        )
    release = release_of("mindiesd") or "of unknown version"
    reason = why_not_mindie()
    if reason is None:
        return Finding.ok(name, f"{release}; its kernel takes our order and mask, which protect the tail of any grid")
    if release in PROMOTES_TAILS:
        return Finding.ok(name, f"{release}, which promotes tails itself; found {reason}")
    return Finding.limit(
        name,
        f"{release} without tail protection: found {reason}, so order and mask are left to it, and it does not "
        "promote the rows of a grid that is no multiple of 8",
        f"{_INSTALL} on a device that its kernel takes, or serve resolutions whose latent grid is a multiple of 8 "
        "(vllm-omni-compile rainfusion tells), or leave RAINFUSION_ATTN out",
    )
