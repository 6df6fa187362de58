"""Inductor's compile workers."""

from __future__ import annotations

import pytest
import torch
from torch._inductor import async_compile

from vllm_omni_diffusion_compile.compile.workers import start_workers


def test_without_an_accelerator_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(async_compile, "maybe_warm_pool", lambda: pytest.fail("started"))
    assert "without an accelerator" in start_workers()


def test_torchs_own_pool_is_warmed_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[bool] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(async_compile, "maybe_warm_pool", lambda: started.append(True))
    assert start_workers() == ""
    assert started == [True]


def test_workers_that_do_not_start_are_no_reason_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(async_compile, "maybe_warm_pool", full)
    assert start_workers() == "the compile workers did not start (OSError: no more processes); torch will try again"
    monkeypatch.delattr(async_compile, "maybe_warm_pool")
    assert "has no compile workers to start (AttributeError" in start_workers()
