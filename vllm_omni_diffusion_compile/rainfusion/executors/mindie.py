"""MindIE-SD's kernel on Ascend NPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from vllm_omni_diffusion_compile.errors import DiffusionCompileError
from vllm_omni_diffusion_compile.rainfusion.geometry import BLOCK
from vllm_omni_diffusion_compile.rainfusion.selection import Selection

_ENTRY = "mindiesd.layers.flash_attn.sparse_flash_attn_rf_v2"
# 0: high precision. Sparsity is what is to make it faster.
_INNER_PRECISE = 0

PROMOTES_TAILS: frozenset[str] = frozenset()
"""Releases of MindIE-SD whose own `sparse_attention` promotes the tail of a grid that is no multiple of 8.

None is known. Source: 3.1.0 leaves the rest of each frame among its tiles (`sparse_flash_attn_rf_v2.py`).
"""

Kernel = Callable[..., torch.Tensor]


class MindIEError(DiffusionCompileError, ImportError):
    """MindIE-SD is not there, does not have the kernel's entry, or refuses the device there."""


class MindIE:
    """Hands order and mask to the kernel below MindIE-SD's `sparse_attention`.

    `sparse_attention` itself orders rows and makes the mask. No release is known to promote the tail of a grid that is
    no multiple of 8 there (`PROMOTES_TAILS`): 3.1.0 leaves the rest of each frame among its tiles, and protects the
    block where video and prefix meet only if the prefix happens to reach it. So neither is left to it, whatever the
    release.

    Args:
        kernel: What takes the place of MindIE-SD's `rain_fusion_attention`.

    Source: the signature is that of `rain_fusion_attention` in MindIE-SD 3.1.0,
    `mindiesd/layers/flash_attn/sparse_flash_attn_rf_v2.py`.
    """

    name = "mindie"
    # The masks that 3.1.0 makes have as many blocks of queries as of keys; nothing says that the kernel takes others.
    takes_a_part = False

    def __init__(self, kernel: Kernel | None = None) -> None:
        self._kernel = kernel or _kernel()

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, selection: Selection, scale: float
    ) -> torch.Tensor:
        """See `Executor.attend`."""
        counts, lists = selection.lists()
        places = torch.arange(lists.shape[-1], device=lists.device)
        lists = torch.where(places < counts[..., None], lists, -1)
        # Its lists have no batch.
        parts = [
            self._kernel(
                query[one], key[one], value[one],
                scale=scale,
                head_num=query.shape[2],
                input_layout="TND",
                select_idx=lists[one].transpose(0, 1).to(torch.int64),
                select_num_idx=counts[one].transpose(0, 1).to(torch.int64),
                blockshape=[BLOCK, BLOCK],
                actual_seq_lengths=[query.shape[1]],
                actual_seq_lengths_kv=[key.shape[1]],
                inner_precise=_INNER_PRECISE,
            )
            for one in range(query.shape[0])
        ]  # fmt: skip
        return torch.stack(parts)


def why_not_mindie() -> str | None:
    """Say why the kernel below MindIE-SD's `sparse_attention` cannot be called here, or None if it can.

    Source: 3.1.0's entry refuses A5 devices, where `sparse_attention` takes another kernel with another mask.
    """
    try:
        entry: Any = importlib.import_module(_ENTRY)
    except ImportError as error:
        return f"no {_ENTRY} ({error})"
    if not hasattr(entry, "rain_fusion_attention"):
        return f"no {_ENTRY}.rain_fusion_attention"
    refuses = getattr(entry, "is_a5_device", None)
    if refuses is not None and refuses():
        return "an A5 device, which rain_fusion_attention of MindIE-SD refuses"
    return None


def _kernel() -> Kernel:
    reason = why_not_mindie()
    if reason is not None:
        raise MindIEError(
            f"found {reason}, expected {_ENTRY}.rain_fusion_attention as in MindIE-SD 3.1.0, on a device that it "
            "takes; install MindIE-SD 3.1.0, or set the executor to 'auto', which then leaves order and mask to "
            "MindIE-SD"
        )
    kernel: Kernel = importlib.import_module(_ENTRY).rain_fusion_attention
    return kernel
