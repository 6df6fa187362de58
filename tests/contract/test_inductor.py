"""The compile cache of a worker of the installed release."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.worker import diffusion_model_runner

from vllm_omni_diffusion_compile.compile.cache.working import VARIABLE, Working
from vllm_omni_diffusion_compile.compile.events import LOG
from vllm_omni_diffusion_compile.upstream import inductor

pytestmark = pytest.mark.contract


@pytest.fixture(autouse=True)
def _own_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """As in a worker that has just started, whose platform has inductor."""
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "vllm"))
    for variable in (VARIABLE, "VLLM_OMNI_DIFFUSION_COMPILE_WORKING_DIR", "VLLM_DISABLE_COMPILE_CACHE"):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    monkeypatch.setattr(inductor, "_working", None)
    monkeypatch.setattr(
        diffusion_model_runner, "current_omni_platform", SimpleNamespace(supports_torch_inductor=lambda: True)
    )
    yield
    LOG.clear()
    LOG.listeners.clear()
    LOG.ready_listeners.clear()


def start(**settings: Any) -> Working | None:
    """Load a model as the runner does; returns what it compiles into."""
    seen: list[str | None] = []
    config = OmniDiffusionConfig.from_kwargs(model="MODEL", model_class_name="Flux2KleinPipeline", **settings)
    load = inductor.prepare_inductor(lambda self, **_: seen.append(os.environ.get(VARIABLE)))
    load(SimpleNamespace(od_config=config), load_format="dummy")
    (told,) = seen
    working = inductor._working
    assert told == (None if working is None else str(working.folder)), "torch is told before anything is loaded"
    return working


def restart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert inductor._working is not None
    inductor._working.close()
    monkeypatch.setattr(inductor, "_working", None)
    monkeypatch.delenv(VARIABLE)
    LOG.listeners.clear()
    LOG.ready_listeners.clear()


def test_what_one_start_compiled_the_next_begins_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    working = start()
    assert working is not None
    assert working.restored is None
    (working.folder / "kernel.so").write_bytes(b"machine code")
    LOG.become_ready()
    assert "1 artifact(s) kept for the next start" in caplog.text
    restart(monkeypatch)
    again = start()
    assert again is not None
    assert (again.folder / "kernel.so").read_bytes() == b"machine code"
    (bundle,) = (tmp_path / "vllm" / "diffusion_compile").glob("*.tar")
    assert f"1 artifact(s) from {bundle}" in caplog.text


@pytest.mark.parametrize(
    "settings",
    [
        {"diffusion_compile_granularity": "full"},
        {"diffusion_compile_dynamic": False},
        {"diffusion_compile_config": {"mode": "max-autotune-no-cudagraphs"}},
        {"dtype": "float16"},
    ],
)
def test_another_configuration_begins_with_nothing(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    working = start()
    assert working is not None
    (working.folder / "kernel.so").write_bytes(b"machine code")
    LOG.become_ready()
    restart(monkeypatch)
    again = start(**settings)
    assert again is not None
    assert again.restored is None


def test_what_a_quantization_is_told_is_part_of_the_key() -> None:
    from vllm_omni.quantization import build_quant_config

    def digest(**told: Any) -> str:
        config = OmniDiffusionConfig.from_kwargs(model="MODEL", model_class_name="Flux2KleinPipeline")
        config.quantization_config = build_quant_config({"method": "int8", **told})
        return inductor._key(config).digest

    assert digest(ignored_layers=["a"]) == digest(ignored_layers=["a"])
    assert len({digest(), digest(ignored_layers=["a"]), digest(ignored_layers=["b"])}) == 3


def test_settings_that_change_nothing_compiled_keep_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    first = start()
    restart(monkeypatch)
    second = start(diffusion_compile_config={"warmup": {"shapes": ["64x64"]}, "on_failure": "raise"})
    assert first is not None
    assert second is not None
    assert first.key == second.key


@pytest.mark.parametrize("settings", [{"enforce_eager": True}, {"diffusion_compile_config": {"cache_dir": False}}])
def test_where_nothing_is_to_be_kept_torch_is_left_alone(settings: dict[str, Any], tmp_path: Path) -> None:
    assert start(**settings) is None
    assert VARIABLE not in os.environ
    assert not (tmp_path / "vllm").exists()


def test_another_directory_is_used(tmp_path: Path) -> None:
    working = start(diffusion_compile_config={"cache_dir": str(tmp_path / "mine")})
    assert working is not None
    assert working.folder.is_relative_to(tmp_path / "mine")


def test_the_hosts_switch_turns_it_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("VLLM_DISABLE_COMPILE_CACHE", "1")
    assert start() is None
    assert "Compile cache: off, since VLLM_DISABLE_COMPILE_CACHE is set" in caplog.text


def test_torchs_own_cache_that_the_user_set_up_is_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "theirs"))
    config = OmniDiffusionConfig.from_kwargs(model="MODEL", model_class_name="Flux2KleinPipeline")
    inductor.prepare_inductor(lambda self: None)(SimpleNamespace(od_config=config))
    assert inductor._working is None
    assert os.environ[VARIABLE] == str(tmp_path / "theirs")
    assert f"torch's own in {tmp_path / 'theirs'}, since {VARIABLE} is set; ours is off" in caplog.text


def test_a_directory_that_others_can_write_does_not_stop_the_start(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    working = start(diffusion_compile_config={"cache_dir": str(shared)})
    assert working is not None
    assert not working.folder.is_relative_to(shared)
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "diffusion_compile_config.cache_dir" in warning.getMessage()
    assert f"chmod go-w {shared}" in warning.getMessage()
