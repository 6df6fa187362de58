"""Compile scopes in the installed model runner, asked as its `load_model` asks."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from vllm_omni.diffusion.offloader.distributed_layerwise_backend import apply_distributed_block_hook
from vllm_omni.diffusion.offloader.layerwise_backend import apply_block_hook
from vllm_omni.diffusion.worker import diffusion_model_runner
from vllm_omni.diffusion.worker.diffusion_model_runner import DiffusionModelRunner
from vllm_omni.model_executor.models.omnivoice.omnivoice_generator import OmniVoiceGenerator

from tests.contract.models import Block, Declared, Undeclared, X, load, pipeline_of, run
from vllm_omni_diffusion_compile.compile.events import LOG
from vllm_omni_diffusion_compile.compile.fallback import FallbackCallable
from vllm_omni_diffusion_compile.errors import ComponentError, SettingError

pytestmark = pytest.mark.contract

CONFIGURED = "configured for lazy"


def compiled_blocks(model: nn.Module) -> int:
    return sum(isinstance(module.forward, FallbackCallable) for module in model.modules())


def configured(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if CONFIGURED in record.getMessage()]


def test_blocks_of_declared_and_undeclared_models_are_compiled_and_the_log_says_which(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pipeline = pipeline_of(transformer=Declared(), transformer_2=Undeclared())
    expected = run(pipeline.transformer), run(pipeline.transformer_2)
    load(pipeline)
    assert compiled_blocks(pipeline.transformer) == compiled_blocks(pipeline.transformer_2) == 2
    torch.testing.assert_close((run(pipeline.transformer), run(pipeline.transformer_2)), expected)
    first, second = configured(caplog)
    assert "transformer configured for lazy regional torch.compile with dynamic=True; 2 module(s) will" in first
    assert "transformer_2 configured" in second and "2 module(s), found by structure," in second and "2 Block" in second


def test_of_a_list_of_lists_the_modules_that_are_called_are_compiled(caplog: pytest.LogCaptureFixture) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.ModuleList([Block(), Block()]) for _ in range(2)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                for block in layer.children():
                    x = block(x)
            return x

    pipeline = pipeline_of(transformer=Nested())
    load(pipeline)
    assert compiled_blocks(pipeline.transformer) == 4
    (line,) = configured(caplog)
    assert line.endswith("4 Block.")


def offload_by_layer(block: nn.Module, following: nn.Module) -> None:
    apply_block_hook(block, following, X.device, Mock(), pin_memory=False)


def offload_by_layer_distributed(block: nn.Module, following: nn.Module) -> None:
    apply_distributed_block_hook(
        block, following, X.device, None, 1, 0, Mock(), Mock(), pin_memory=False, shared_buffers=[None, None]
    )


@pytest.mark.parametrize("offload", [offload_by_layer, offload_by_layer_distributed])
def test_blocks_whose_weights_are_offloaded_are_found_as_if_they_were_there(
    offload: Callable[[nn.Module, nn.Module], None], caplog: pytest.LogCaptureFixture
) -> None:
    """`load_model` offloads first: what then is there of the blocks is nothing, and of the rest everything."""
    model = Undeclared()
    model.blocks.append(Block())
    model.embed = nn.Linear(4, 4)
    model.small = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    blocks = list(model.blocks)
    for block, following in zip(blocks, [*blocks[1:], blocks[0]], strict=True):
        offload(block, following)
    assert all(parameter.numel() == 0 for parameter in model.blocks.parameters())
    load(pipeline_of(transformer=model))
    (line,) = configured(caplog)
    assert line.endswith("3 Block.")


def test_the_log_does_not_claim_what_was_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    pipeline = pipeline_of(transformer=Undeclared())
    load(pipeline, infer_regions=False)
    assert compiled_blocks(pipeline.transformer) == 0
    assert configured(caplog) == []
    assert "transformer is not compiled: it declares no _repeated_blocks, and infer_regions is off" in caplog.text


def test_full_scope_compiles_the_component(caplog: pytest.LogCaptureFixture) -> None:
    pipeline = pipeline_of(transformer=Undeclared())
    expected = run(pipeline.transformer)
    load(pipeline, scope="full", dynamic=False)
    torch.testing.assert_close(run(pipeline.transformer), expected)
    assert isinstance(pipeline.transformer._compiled_call_impl, FallbackCallable)
    (line,) = configured(caplog)
    assert "lazy full torch.compile with dynamic=False; 1 module(s)" in line


@pytest.mark.parametrize("scope", ["regional", "full"])
def test_what_is_no_module_is_said_not_to_be_compiled(scope: str, caplog: pytest.LogCaptureFixture) -> None:
    class Holder:
        def __init__(self) -> None:
            self.inner = Undeclared()

    load(pipeline_of(transformer=Holder()), scope=scope)
    assert configured(caplog) == []
    assert "transformer is not compiled: it is of the class Holder, which is no torch module." in caplog.text


def test_what_is_no_module_and_stands_for_one_is_left_to_the_release() -> None:
    class Proxy:
        def __init__(self, inner: nn.Module) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

    inner = Declared()
    load(pipeline_of(transformer=Proxy(inner)))
    assert all("forward" in vars(block) for block in inner.blocks)


def test_of_a_list_of_components_each_is_compiled_in_full_scope(caplog: pytest.LogCaptureFixture) -> None:
    class Experts(nn.Module):
        _dit_modules = ("transformers",)

    models = [Undeclared(), Undeclared()]
    expected = [run(model) for model in models]
    load(pipeline_of(Experts, transformers=nn.ModuleList(models)), scope="full")
    assert [isinstance(model._compiled_call_impl, FallbackCallable) for model in models] == [True, True]
    torch.testing.assert_close([run(model) for model in models], expected)
    (line,) = configured(caplog)
    assert "2 module(s)" in line and line.endswith("2 Undeclared.")


def test_a_component_that_is_called_in_parts_is_said_not_to_be_compiled_whole(caplog: pytest.LogCaptureFixture) -> None:
    load(pipeline_of(transformer=pipeline_of(blocks=Undeclared().blocks)), scope="full")
    assert configured(caplog) == []
    assert "transformer is not compiled: it has no forward(): its pipeline calls parts of it" in caplog.text
    assert "full compiles it whole" not in caplog.text


def test_full_scope_compiles_the_part_of_an_unnamed_model_that_is_called(caplog: pytest.LogCaptureFixture) -> None:
    head = pipeline_of(model=Undeclared())
    load(pipeline_of(policy=head), scope="full")
    assert isinstance(head.model._compiled_call_impl, FallbackCallable)
    (line,) = configured(caplog)
    assert "policy.model configured" in line


def test_dotted_paths_are_followed_and_a_path_to_nothing_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Hybrid(nn.Module):
        _dit_modules = ("language_model.model", "gone.model", "optional")

    pipeline = pipeline_of(Hybrid, language_model=pipeline_of(model=Undeclared()))
    pipeline.optional = None
    load(pipeline)
    assert compiled_blocks(pipeline.language_model.model) == 2
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "Hybrid declares 'gone.model' in _dit_modules, and Hybrid has no attribute 'gone'" in record.getMessage()


def test_a_path_to_nothing_fails_the_start_where_failures_are_to_be_raised() -> None:
    class Hybrid(nn.Module):
        _dit_modules = ("gone.model",)

    with pytest.raises(ComponentError, match=r"'gone.model'.*no attribute 'gone'"):
        load(pipeline_of(Hybrid), on_failure="raise")


def test_a_pipeline_that_names_no_component_is_searched_for_the_one_that_denoises(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pipeline = pipeline_of(policy=Undeclared(), text_encoder=Undeclared(), vae=Undeclared())
    load(pipeline)
    assert [compiled_blocks(child) for child in pipeline.children()] == [2, 0, 0]
    (line,) = configured(caplog)
    assert "policy configured" in line


@pytest.mark.parametrize("direct", [True, False], ids=["blocks beside a VAE", "a model beside a VAE"])
def test_a_pipeline_that_keeps_all_in_one_module_has_its_vae_and_encoder_left_out(
    direct: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class AllInOne(nn.Module):
        _vae_modules = ("model.codec",)
        _encoder_modules = ("model.prompts.inner", "model.not_loaded")

    codec, prompts = Declared(), pipeline_of(inner=Undeclared())
    codec.wide = nn.Linear(64, 64)
    net = Undeclared()
    model = pipeline_of(codec=codec, prompts=prompts, **({"blocks": net.blocks} if direct else {"net": net}))
    load(pipeline_of(AllInOne, model=model))
    assert [compiled_blocks(part) for part in (codec, prompts, net)] == [0, 0, 2]
    (line,) = configured(caplog)
    assert line.endswith("2 Block.")


def test_a_model_that_does_not_repeat_as_a_whole_is_searched_for_the_part_that_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = pipeline_of(backbone=nn.Linear(64, 64), action_head=pipeline_of(model=Undeclared(), norm=nn.LayerNorm(4)))
    load(pipeline_of(policy=model))
    assert compiled_blocks(model.action_head.model) == 2
    (line,) = configured(caplog)
    assert "policy.action_head configured" in line


def test_a_pipeline_in_which_nothing_repeats_is_told_so_once(caplog: pytest.LogCaptureFixture) -> None:
    load(pipeline_of(policy=nn.Linear(4, 4)))
    assert configured(caplog) == []
    assert caplog.text.count("names no component in _dit_modules") == 1


class Recorder:
    """Stands in for torch.compile and records its options."""

    def __init__(self, error: Exception | None = None) -> None:
        self.options: list[dict[str, Any]] = []
        self.error = error

    def __call__(self, function: Any, **options: Any) -> Any:
        if self.error is not None:
            raise self.error
        self.options.append(options)
        return function


@pytest.mark.parametrize(
    ("dynamic", "config", "expected"),
    [
        (True, {}, {"dynamic": True}),
        (False, {}, {"dynamic": False, "recompile_limit": 64}),
        (True, {"recompile_limit": 3}, {"dynamic": True, "recompile_limit": 3}),
        (True, {"mode": "max-autotune-no-cudagraphs"}, {"dynamic": True, "mode": "max-autotune-no-cudagraphs"}),
    ],
)
def test_options_reach_torch_compile(
    dynamic: bool, config: dict[str, Any], expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    # The signature says whether this torch takes a limit with each call of torch.compile.
    recorder.__signature__ = inspect.signature(torch.compile)  # type: ignore[attr-defined]
    monkeypatch.setattr(torch, "compile", recorder)
    load(pipeline_of(transformer=Declared()), dynamic=dynamic, **({"backend": "auto"} | config))
    assert recorder.options == [expected] * 2


def test_the_recompile_limit_holds_above_what_torch_compiles_of_any_code_and_only_there() -> None:
    pipeline = pipeline_of(transformer=Declared())
    LOG.clear()
    torch.compiler.reset()
    # In place of 256, which takes minutes to reach; the limits of old releases of torch are the process's.
    with torch._dynamo.config.patch(accumulated_recompile_limit=3, recompile_limit=3), torch.no_grad():
        load(pipeline, dynamic=False, recompile_limit=6)
        for rows in range(2, 9):
            pipeline.transformer(torch.ones(rows, 4))
        if "recompile_limit" in inspect.signature(torch.compile).parameters:
            assert torch._dynamo.config.accumulated_recompile_limit == 3
    assert [event.kind for event in LOG.since()[0]] == ["compilation", *["recompilation"] * 5, "recompile limit"]


def test_a_set_up_that_fails_leaves_the_component_eager_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "compile", Recorder(RuntimeError("no such option")))
    pipeline = pipeline_of(transformer=Declared())
    load(pipeline)
    assert compiled_blocks(pipeline.transformer) == 0
    assert configured(caplog) == []
    assert "setup for transformer failed before activation (RuntimeError: no such option)" in caplog.text
    with pytest.raises(RuntimeError, match="no such option"):
        load(pipeline, on_failure="raise")


def test_a_backend_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(SettingError, match=r"diffusion_compile_config\.backend is 'inducter'"):
        load(pipeline_of(transformer=Declared()), backend="inducter")


def test_somebody_elses_regionally_compile_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def theirs(model: Any, **options: Any) -> Any:
        calls.append(options)
        return model

    monkeypatch.setattr(diffusion_model_runner, "regionally_compile", theirs)
    load(pipeline_of(transformer=Declared()))
    assert calls == [{"dynamic": True}]


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_model_with_a_compile_method_of_its_own_gets_what_the_release_hands_it(dynamic: bool) -> None:
    class Own(Undeclared):
        def compile(self, **options: Any) -> None:
            self.options = options

    pipeline = pipeline_of(transformer=Own())
    load(pipeline, scope="full", dynamic=dynamic, backend="auto")
    assert pipeline.transformer.options == {"dynamic": dynamic}


def test_a_configuration_of_four_attributes_is_enough(caplog: pytest.LogCaptureFixture) -> None:
    runner = object.__new__(DiffusionModelRunner)
    runner.pipeline = pipeline_of(transformer=Declared())
    runner.od_config = SimpleNamespace(
        enforce_eager=False,
        diffusion_compile_granularity="regional",
        diffusion_compile_dynamic=True,
        diffusion_compile_vae=True,
    )
    runner._compile_transformer("transformer")
    assert compiled_blocks(runner.pipeline.transformer) == 2


class WithoutInductor:
    def supports_torch_inductor(self) -> bool:
        return False


def offload(pipeline: Any, monkeypatch: pytest.MonkeyPatch, **config: Any) -> None:
    """What `load_model` calls last before it would compile, on a platform without inductor."""
    monkeypatch.setattr(diffusion_model_runner, "current_omni_platform", WithoutInductor())
    od_config = SimpleNamespace(
        enforce_eager=False, enable_cpu_offload=False, enable_layerwise_offload=False,
        enable_distributed_layerwise_offload=False, diffusion_offload_config=None, diffusion_compile_config=config,
    )  # fmt: skip
    diffusion_model_runner.enable_offload_backend(od_config, pipeline, device=torch.device("cpu"))


def test_a_platform_without_inductor_compiles_with_the_backend_that_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = pipeline_of(transformer=Declared())
    offload(pipeline, monkeypatch, backend="eager")
    assert compiled_blocks(pipeline.transformer) == 2


def test_a_platform_without_inductor_compiles_nothing_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = pipeline_of(transformer=Declared())
    offload(pipeline, monkeypatch)
    assert compiled_blocks(pipeline.transformer) == 0


def test_inductor_by_name_on_a_platform_without_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingError, match="backend is 'inductor', but the platform WithoutInductor"):
        offload(pipeline_of(transformer=Declared()), monkeypatch, backend="inductor")


class AddsItsOwnNumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.add(self.eps, x, alpha=0.25)


class CosmosLearnablePositionalEmbed(AddsItsOwnNumber):
    """Named like the module of Anima that does the same."""


@pytest.mark.parametrize(
    ("module", "right"), [(CosmosLearnablePositionalEmbed, True), (AddsItsOwnNumber, False)], ids=["Anima's", "another"]
)
def test_what_torch_computes_wrongly_with_dynamic_shapes_stays_out_of_full_scope(
    module: type[nn.Module], right: bool
) -> None:
    # The second case is torch's fault itself: once it fails here, the list of such modules can go.
    model = nn.Sequential(nn.Linear(4, 4), module())
    expected = model(X)
    load(pipeline_of(transformer=model), scope="full", backend="aot_eager")
    torch.compiler.reset()
    with torch.no_grad():
        assert torch.allclose(model(X), expected) is right


@pytest.mark.parametrize("cuda", [True, False])
def test_what_captures_cuda_graphs_of_its_own_stays_out_of_full_scope_where_it_does(
    cuda: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # The release's own name for it; a generator without graphs has None there.
    assert "self._cuda_graph_fwd" in inspect.getsource(OmniVoiceGenerator.__init__)
    model = Undeclared()
    vars(model)["_cuda_graph_fwd"] = object()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    load(pipeline_of(transformer=model), scope="full")
    assert (model._compiled_call_impl is None) == cuda
    assert ("captures CUDA graphs of its own" in caplog.text) == cuda
    assert bool(configured(caplog)) != cuda
