"""FlashAttention-4, on Hopper."""

from __future__ import annotations

import functools
from typing import Any

import torch

from vllm_omni_diffusion_compile.errors import DiffusionCompileError
from vllm_omni_diffusion_compile.rainfusion.geometry import BLOCK
from vllm_omni_diffusion_compile.rainfusion.selection import Selection

_ENTRY = "flash_attn.cute"
# Head sizes whose kernels on Hopper work on 128 keys at a time, which is what a list of blocks is made of.
_HEAD_SIZES = range(8, 129, 8)
_HOPPER = (9, 0)


class FlashError(DiffusionCompileError, ImportError):
    """FlashAttention-4 is not there, or does not run here."""


class Flash:
    """FlashAttention-4's block sparsity: its Hopper kernel walks the lists that are handed to it.

    vLLM-Omni brings it with its extra `fa4`. One compile serves all lengths.

    Source: `flash_attn.cute.flash_attn_func` of flash-attn-4 4.0.0b18. It masks rows beyond the end in the first block
    that it visits, which is the last one of a list: the last block of keys is protected, so every list ends with it.
    """

    name = "flash"
    takes_a_part = True

    def __init__(self) -> None:
        reason = why_not_flash()
        if reason is not None:
            raise FlashError(
                f"found {reason}, expected a Hopper GPU and flash-attn-4 (vLLM-Omni's extra `fa4`); install it, or set "
                "the executor to 'auto' or 'flex'"
            )

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, selection: Selection, scale: float
    ) -> torch.Tensor:
        """See `Executor.attend`."""
        attention, block_lists = _entry()
        counts, lists = selection.lists()
        none = torch.zeros_like(counts)
        out = attention(
            query, key, value,
            softmax_scale=scale,
            block_sparse_tensors=block_lists(
                mask_block_cnt=none, mask_block_idx=none[..., None],
                full_block_cnt=counts, full_block_idx=lists,
                block_size=(BLOCK, BLOCK),
            ),
        )  # fmt: skip
        first: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return first


@functools.cache
def why_not_flash() -> str | None:
    """Say why FlashAttention-4 cannot run on this machine, or None if it can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.cuda.get_device_capability() != _HOPPER:
        return "compute capability {}.{}".format(*torch.cuda.get_device_capability())
    try:
        _entry()
    except (ImportError, AttributeError) as error:
        return f"no {_ENTRY} ({error})"
    return None


def takes_head_size(size: int) -> bool:
    """Whether its kernels for this head size work on blocks of 128 keys."""
    return size in _HEAD_SIZES


@functools.cache
def _entry() -> tuple[Any, Any]:
    import importlib

    return (
        importlib.import_module(_ENTRY).flash_attn_func,
        importlib.import_module(f"{_ENTRY}.block_sparsity").BlockSparseTensorsTorch,
    )
