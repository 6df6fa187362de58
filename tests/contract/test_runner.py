"""Compiled VAE decode in the installed model runner."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_omni.diffusion import compile as host_compile
from vllm_omni.diffusion.data import DiffusionRequestAbortedError
from vllm_omni.diffusion.worker import diffusion_model_runner
from vllm_omni.diffusion.worker.diffusion_model_runner import DiffusionModelRunner
from vllm_omni.errors import OmniClientError

pytestmark = pytest.mark.contract


class Vae(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((1,), 2.0))

    def decode(self, z: torch.Tensor, return_dict: bool = True) -> torch.Tensor:
        return z * self.scale + 1


def runner_of(pipeline: Any, **config: Any) -> Any:
    """A runner as the upstream project's own tests build it: no weights, four attributes of configuration."""
    runner = object.__new__(DiffusionModelRunner)
    runner.pipeline = pipeline
    runner.od_config = SimpleNamespace(
        enforce_eager=False,
        diffusion_compile_granularity="regional",
        diffusion_compile_dynamic=True,
        diffusion_compile_vae=True,
    )
    vars(runner.od_config).update(config)
    return runner


class Recorder:
    """Stands in for torch.compile and records how it was called."""

    def __init__(self, error: Exception | None = None) -> None:
        self.options: list[dict[str, Any]] = []
        self.error = error

    def __call__(self, function: Any, **options: Any) -> Any:
        self.options.append(options)
        if self.error is not None:
            error = self.error

            def failing(*args: Any, **kwargs: Any) -> Any:
                raise error

            return failing
        return lambda *args, **kwargs: ("compiled", function(*args, **kwargs))


def test_declared_components_are_compiled_once_each(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder()
    monkeypatch.setattr(torch, "compile", recorder)
    vae, audio = Vae(), Vae()
    pipeline = SimpleNamespace(
        vae=vae,
        alias=vae,
        model=SimpleNamespace(audio_vae=audio),
        _vae_modules=["vae", "alias", "model.audio_vae", "gone.vae"],
    )
    runner_of(pipeline)._compile_vae_decodes()
    assert recorder.options == [{"mode": "default", "fullgraph": False, "dynamic": None}] * 2
    assert vae.decode(torch.ones(1))[0] == "compiled"
    assert audio.decode(torch.ones(1))[0] == "compiled"
    assert "'gone.vae'" in caplog.text


def test_calling_it_again_compiles_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr(torch, "compile", recorder)
    runner = runner_of(SimpleNamespace(vae=Vae(), _vae_modules=["vae"]))
    runner._compile_vae_decodes()
    runner._compile_vae_decodes()
    assert len(recorder.options) == 1


@pytest.mark.parametrize("config", [{"diffusion_compile_vae": False}, {"enforce_eager": True}])
def test_switched_off_nothing_is_touched(monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]) -> None:
    recorder = Recorder()
    monkeypatch.setattr(torch, "compile", recorder)
    vae = Vae()
    runner_of(SimpleNamespace(vae=vae, _vae_modules=["vae"]), **config)._compile_vae_decodes()
    assert recorder.options == []
    assert "decode" not in vars(vae)


def test_a_failing_set_up_continues_eagerly(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no backend here")

    monkeypatch.setattr(torch, "compile", refuse)
    decode = Vae().decode
    assert host_compile.compile_callable_with_fallback(decode, label="vae.decode", mode="default") == (decode, False)
    assert "continuing eagerly" in caplog.text and "no backend here" in caplog.text


def test_a_failing_call_is_answered_eagerly_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "compile", Recorder(RuntimeError("ptxas died\nand more")))
    vae = Vae()
    runner_of(SimpleNamespace(vae=vae, _vae_modules=["vae"]))._compile_vae_decodes()
    for _ in range(3):
        assert vae.decode(torch.ones(1)).tolist() == [3.0]
    lines = {record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING}
    (line,) = lines
    assert "disabling compilation and retrying eagerly" in line
    assert "vae.decode" in line and "RuntimeError: ptxas died" in line and "and more" not in line


@pytest.mark.parametrize("error", [DiffusionRequestAbortedError("gone"), OmniClientError("bad size")])
def test_aborts_and_client_errors_pass_through_untried(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(torch, "compile", Recorder(error))
    calls: list[int] = []
    call, activated = host_compile.compile_callable_with_fallback(calls.append, label="decode")
    assert activated
    with pytest.raises(type(error)):
        call(1)
    assert calls == []


@pytest.mark.parametrize(
    ("pipeline_name", "config", "reason"),
    [
        ("MiniMaxH3Pipeline", {}, "decode_latent"),
        ("LancePipeline", {}, "decode_video"),
        ("LingBotWorldCausalDMDPipeline", {}, "streaming decoder"),
        ("Flux2KleinPipeline", {"parallel_config": SimpleNamespace(vae_patch_parallel_size=2)}, "2 ranks"),
    ],
)
def test_what_should_not_be_compiled_is_left_alone_and_said(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    pipeline_name: str,
    config: dict[str, Any],
    reason: str,
) -> None:
    recorder = Recorder()
    monkeypatch.setattr(torch, "compile", recorder)
    pipeline = type(pipeline_name, (), {"_vae_modules": ["video_vae"]})()
    pipeline.video_vae = Vae()
    runner_of(pipeline, **config)._compile_vae_decodes()
    assert recorder.options == []
    assert any(reason in record.getMessage() and record.levelno == logging.INFO for record in caplog.records)


@pytest.mark.parametrize(
    ("config", "ranks", "tiled"),
    [({"vae_policy": "never"}, 1, True), ({"vae_scope": "blocks"}, 1, True), ({"vae_policy": "never"}, 2, False)],
)
def test_a_decode_that_is_not_compiled_is_tried_in_tiles_where_it_runs_out_of_memory(
    caplog: pytest.LogCaptureFixture, config: dict[str, str], ranks: int, tiled: bool
) -> None:
    class Large(Vae):
        use_tiling = False

        def enable_tiling(self) -> None:
            self.use_tiling = True

        def decode(self, z: torch.Tensor, return_dict: bool = True) -> torch.Tensor:
            if not self.use_tiling:
                raise torch.OutOfMemoryError("80 GiB")
            return super().decode(z, return_dict)

    vae = Large()
    parallel = SimpleNamespace(vae_patch_parallel_size=ranks)
    runner = runner_of(
        SimpleNamespace(vae=vae, _vae_modules=["vae"]), diffusion_compile_config=config, parallel_config=parallel
    )
    runner._compile_vae_decodes()
    if tiled:
        assert vae.decode(torch.ones(1)).tolist() == [3.0]
        assert "ran out of memory; retrying in tiles gave the result" in caplog.text
    else:  # of several ranks that decode one picture together none does something else alone
        with pytest.raises(torch.OutOfMemoryError):
            vae.decode(torch.ones(1))


@pytest.mark.parametrize("name", ["MiniMaxH3Pipeline", "LancePipeline", "LingBotWorldCausalDMDPipeline"])
def test_the_pipelines_that_are_left_alone_exist_in_the_release(name: str) -> None:
    from vllm_omni.diffusion.registry import DiffusionModelRegistry

    cls = DiffusionModelRegistry._try_load_model_cls(name)
    assert cls is not None
    assert name in {base.__name__ for base in cls.__mro__}


def test_load_model_compiles_after_the_release_has_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr(torch, "compile", recorder)
    monkeypatch.setattr(diffusion_model_runner.current_omni_platform, "supports_torch_inductor", lambda: True)
    vae = Vae()
    runner = runner_of(SimpleNamespace(vae=vae, _vae_modules=["vae"]))
    runner.load_model(load_format="dummy")  # the release loads nothing for it, and keeps the pipeline
    assert vae.decode(torch.ones(1))[0] == "compiled"


@pytest.mark.parametrize("case", ["setup_compile", "no inductor"])
def test_load_model_leaves_other_pipelines_to_themselves(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    recorder = Recorder()
    monkeypatch.setattr(torch, "compile", recorder)
    monkeypatch.setattr(
        diffusion_model_runner.current_omni_platform, "supports_torch_inductor", lambda: case != "no inductor"
    )
    pipeline = SimpleNamespace(vae=Vae(), _vae_modules=["vae"])
    if case == "setup_compile":
        pipeline.setup_compile = lambda: None
    runner_of(pipeline).load_model(load_format="dummy")
    assert recorder.options == []
