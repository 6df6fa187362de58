"""The installed vLLM-Omni with our plugin registered, as vLLM registers it."""

from __future__ import annotations

import pytest

from vllm_omni_diffusion_compile.plugin import register

register()


@pytest.fixture(scope="session")
def release() -> tuple[int, int]:
    """Major and minor version of the installed vLLM-Omni."""
    import vllm_omni

    major, minor, *_ = vllm_omni.__version__.split(".")
    return int(major), int(minor)
