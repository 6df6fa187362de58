"""Caches, and our plugin in the process of the tests."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM-Omni without the network, with our plugin, and with caches that the engines of a run share."""
    caches = tmp_path_factory.mktemp("caches")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("VLLM_NO_USAGE_STATS", "1")
        patch.setenv("VLLM_CACHE_ROOT", str(caches / "vllm"))
        patch.setenv("HF_MODULES_CACHE", str(caches / "modules"))
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(caches / "inductor")))
        from vllm_omni_diffusion_compile.plugin import register

        register()
        # What a thread pool gains on models this small it loses again where the machine is shared.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def host_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let caplog see the host's log lines, whatever an engine before has done to its loggers."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO)
