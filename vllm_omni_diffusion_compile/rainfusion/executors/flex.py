"""FlexAttention, on CUDA and CPU."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from vllm_omni_diffusion_compile.errors import DiffusionCompileError
from vllm_omni_diffusion_compile.rainfusion.geometry import BLOCK
from vllm_omni_diffusion_compile.rainfusion.selection import Selection


class NotCompiledError(DiffusionCompileError, RuntimeError):
    """FlexAttention ran without the compiler, where it reads no block lists and would attend densely."""


class Flex:
    """FlexAttention with the chosen blocks as lists of full blocks.

    FlexAttention honours block lists only when it is compiled; without the compiler it computes dense attention and
    says nothing. Compiled as one graph, it cannot fall back to that: torch raises instead, and so does this if
    the compiler is off.

    Args:
        kernel_options: As `flex_attention` takes them.
    """

    name = "flex"
    takes_a_part = True

    def __init__(self, **kernel_options: Any) -> None:
        self._kernel_options = kernel_options or None

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, selection: Selection, scale: float
    ) -> torch.Tensor:
        """See `Executor.attend`."""
        out: torch.Tensor = _compiled()(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            _block_mask(selection, query.shape[1], key.shape[1]),
            scale=scale,
            kernel_options=self._kernel_options,
        )
        return out.transpose(1, 2)


@functools.cache
def _compiled() -> Any:
    """Compile once: the first length as it is, a second one as any length, and every mask of either."""
    return torch.compile(_attention, fullgraph=True)


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: BlockMask, **options: Any) -> Any:
    if not torch.compiler.is_compiling():
        raise NotCompiledError(
            "FlexAttention was to run without the compiler, where it ignores which blocks are chosen; let torch "
            "compile (TORCH_COMPILE_DISABLE, torch.compiler.set_stance), or set the executor to 'reference'"
        )
    return flex_attention(query, key, value, block_mask=mask, **options)


def _block_mask(selection: Selection, query_rows: int, rows: int) -> BlockMask:
    counts, lists = selection.lists()
    none = torch.zeros_like(counts)
    return BlockMask.from_kv_blocks(
        none, torch.zeros_like(lists), counts, lists,
        BLOCK_SIZE=BLOCK, seq_lengths=(query_rows, rows), **_LISTS_OF_KEYS_ONLY,
    )  # fmt: skip


# The lists of queries for each key block serve the backward pass. Older releases always make them.
_LISTS_OF_KEYS_ONLY: dict[str, Any] = (
    {"compute_q_blocks": False} if "compute_q_blocks" in inspect.signature(BlockMask.from_kv_blocks).parameters else {}
)
