"""MindIE-SD's kernel on Ascend NPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm_omni_diffusion_compile.errors import DiffusionCompileError
from vllm_omni_diffusion_compile.rainfusion.geometry import BLOCK
from vllm_omni_diffusion_compile.rainfusion.selection import Selection

_ENTRY = "mindiesd.layers.flash_attn.sparse_flash_attn_rf_v2"
# 0: high precision. Sparsity is what is to make it faster.
_INNER_PRECISE = 0

Kernel = Callable[..., torch.Tensor]


class MindIEError(DiffusionCompileError, ImportError):
    """MindIE-SD is not there, or does not have the kernel's entry."""


class MindIE:
    """Hands order and mask to the kernel below MindIE-SD's `sparse_attention`.

    `sparse_attention` itself orders rows and makes the mask. No release is known to promote the tail of a grid that is
    no multiple of 8 there: 3.1.0 leaves the rest of each frame among its tiles, and protects the block where video and
    prefix meet only if the prefix happens to reach it. So neither is left to it, whatever the release.

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


def _kernel() -> Kernel:
    import importlib

    try:
        entry: Any = importlib.import_module(_ENTRY)
        kernel: Kernel = entry.rain_fusion_attention
    except (ImportError, AttributeError) as error:
        raise MindIEError(
            f"found no {_ENTRY}.rain_fusion_attention ({error}), expected that of MindIE-SD 3.1.0; install MindIE-SD, "
            "or select another diffusion attention backend"
        ) from error
    return kernel
