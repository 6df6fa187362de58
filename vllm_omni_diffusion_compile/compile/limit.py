"""How often torch compiles one piece of code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo


def with_room_for(limit: int | None, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Have torch compile a piece of code as often as `recompile_limit` allows, in calls of `compiled` alone.

    It also stops at a limit that is no option of `torch.compile`: `accumulated_recompile_limit`, 256, of everything
    that it compiled for the same code.

    Args:
        limit: The `recompile_limit` that `compiled` was made with; None if it has none of its own.
        compiled: What `torch.compile` returned.

    Source: `torch._dynamo.cache_size.exceeds_recompile_limit`.
    """
    config = torch._dynamo.config  # noqa: SLF001 - torch has no public name for it
    if limit is None or limit <= config.accumulated_recompile_limit:
        return compiled

    def call(*args: Any, **kwargs: Any) -> Any:
        before = config.accumulated_recompile_limit
        # Not `config.patch`, which takes three times as long, before every call.
        config.accumulated_recompile_limit = max(before, limit)
        try:
            return compiled(*args, **kwargs)
        finally:
            config.accumulated_recompile_limit = before

    return call
