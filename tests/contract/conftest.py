"""The installed vLLM-Omni with our plugin registered, as vLLM registers it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.host import generic
from vllm_omni_diffusion_compile.plugin import register

register()


@pytest.fixture(scope="session", autouse=True)
def _caches_of_this_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A model that a test loads opens the compile cache: not the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CACHE_ROOT", str(tmp_path_factory.mktemp("caches")))
        yield


@pytest.fixture
def generic_model(tmp_path: Path) -> str:
    """A model that no registered pipeline claims; resolving its stages reads the index alone."""
    return generic(tmp_path / "generic")


@pytest.fixture(autouse=True)
def host_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let caplog see the host's log lines, whatever building its command line has done to the root logger's level."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO)
