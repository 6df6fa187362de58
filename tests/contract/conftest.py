"""The installed vLLM-Omni with our plugin registered, as vLLM registers it."""

from __future__ import annotations

import logging

import pytest

from vllm_omni_diffusion_compile.plugin import register

register()


@pytest.fixture(autouse=True)
def host_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let caplog see the host's log lines, whatever building its command line has done to the root logger's level."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO)


@pytest.fixture(scope="session")
def release() -> tuple[int, int]:
    """Major and minor version of the installed vLLM-Omni."""
    import vllm_omni

    major, minor, *_ = vllm_omni.__version__.split(".")
    return int(major), int(minor)
