"""Where the cache of this process is, or why there is none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from vllm_omni_diffusion_compile.compile.cache.store import default_directory
from vllm_omni_diffusion_compile.compile.cache.working import VARIABLE, belongs_to_user

_DISABLE = "VLLM_DISABLE_COMPILE_CACHE"


def cache_directory(cache_dir: str | Literal[False] | None) -> tuple[Path | None, str]:
    """Return the cache directory that a setting and the environment come to.

    Args:
        cache_dir: The key `cache_dir`.

    Returns:
        The directory and which of them chose it; or None and why there is none.
    """
    if cache_dir is False:
        return None, "off, since cache_dir is false"
    if os.environ.get(_DISABLE, "0") not in ("", "0"):
        return None, f"off, since {_DISABLE} is set"
    if (theirs := belongs_to_user()) is not None:
        return None, f"torch's own in {theirs}, since {VARIABLE} is set; ours is off"
    if cache_dir:
        return Path(cache_dir).expanduser(), "cache_dir"
    chosen = next((name for name in ("VLLM_CACHE_ROOT", "XDG_CACHE_HOME") if name in os.environ), "default")
    return default_directory(), chosen
