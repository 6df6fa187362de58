"""Which modules of a component are compiled as regions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from vllm_omni_diffusion_compile.compile.components import denoising_modules, missing_part, resolve
from vllm_omni_diffusion_compile.compile.regions import Region, declared_regions, inferred_regions


class Called(nn.Module):
    """Has a forward, unlike a list of modules."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Inner(Called):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


class Block(Called):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleList([Inner(), Inner()])


class Single(Called):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)


class Wrapper(Called):
    """Keeps a module the way FSDP, DataParallel or torch.compile do."""

    def __init__(self, attribute: str, inner: nn.Module) -> None:
        super().__init__()
        setattr(self, attribute, inner)


def found(regions: list[Region]) -> list[tuple[str, str]]:
    return [(region.path, region.cls) for region in regions]


def component(**children: nn.Module) -> nn.Module:
    model = nn.Module()
    for name, child in children.items():
        setattr(model, name, child)
    return model


def test_declared_blocks_are_found_in_order_and_blocks_inside_of_them_are_not() -> None:
    model = component(first=nn.ModuleList([Block(), Block()]), second=nn.ModuleList([Single()]))
    assert found(declared_regions(model, ["Block", "Inner", "Single"])) == [
        ("first.0", "Block"),
        ("first.1", "Block"),
        ("second.0", "Single"),
    ]


def test_a_block_that_is_shared_is_one_region() -> None:
    block = Block()
    assert len(declared_regions(component(a=block, b=block), ["Block"])) == 1


@pytest.mark.parametrize("attribute", ["_fsdp_wrapped_module", "module", "_orig_mod"])
def test_a_wrapped_block_is_compiled_inside_of_its_wrapper(attribute: str) -> None:
    block = Block()
    (region,) = declared_regions(component(blocks=nn.ModuleList([Wrapper(attribute, block)])), ["Block"])
    assert region.module is block
    assert region.path == "blocks.0"


def test_a_declared_block_with_a_module_of_its_own_stays_whole() -> None:
    class Residual(Called):
        def __init__(self) -> None:
            super().__init__()
            self.module = Single()

    (region,) = declared_regions(component(blocks=nn.ModuleList([Residual()])), ["Residual"])
    assert region.cls == "Residual"


def test_a_block_that_fully_shard_gave_a_class_of_its_own_is_found_by_the_old_name() -> None:
    class FSDPModule:  # the name of torch.distributed.fsdp's
        pass

    block = Block()
    block.__class__ = type("FSDPBlock", (FSDPModule, Block), {})
    (region,) = declared_regions(component(blocks=nn.ModuleList([block])), ["Block"])
    assert region.cls == "Block"


def test_members_of_an_offloaded_list_are_blocks_whatever_their_class() -> None:
    model = component(layers=nn.ModuleList([Single(), Block()]), others=nn.ModuleList([Single()]))
    assert found(declared_regions(model, ["Elsewhere"], ["layers"])) == [("layers.0", "Single"), ("layers.1", "Block")]


def test_a_model_that_compiled_its_own_block_keeps_one_region_for_it() -> None:
    block = Block()
    compiled: Any = torch.compile(block, backend="eager")
    model = component(blocks=nn.ModuleList([compiled]))
    (region,) = declared_regions(model, ["Block"])
    assert region.module is block


def test_lists_of_one_class_that_hold_most_of_the_parameters_are_inferred() -> None:
    model = component(
        embed=nn.Linear(8, 8), double=nn.ModuleList([Block(), Block()]), single=nn.ModuleList([Single(), Single()])
    )
    assert found(inferred_regions(model)) == [
        ("double.0", "Block"),
        ("double.1", "Block"),
        ("single.0", "Single"),
        ("single.1", "Single"),
    ]


def test_blocks_of_blocks_are_inferred_as_the_outer_ones() -> None:
    assert found(inferred_regions(component(blocks=nn.ModuleList([Block(), Block()])))) == [
        ("blocks.0", "Block"),
        ("blocks.1", "Block"),
    ]


@pytest.mark.parametrize(
    "model",
    [
        component(blocks=nn.ModuleList([Single()])),
        component(blocks=nn.ModuleList([Block(), Single()])),
        component(embed=nn.Linear(64, 64), blocks=nn.ModuleList([Single(), Single()])),
        component(norms=nn.ModuleList([nn.Identity(), nn.Identity()])),
        nn.Linear(4, 4),
    ],
    ids=["one block", "two classes", "a small part", "no parameters", "no list"],
)
def test_what_does_not_repeat_or_is_a_small_part_is_not_inferred(model: nn.Module) -> None:
    assert inferred_regions(model) == []


@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.ModuleList([Inner(), Single(), nn.LayerNorm(4)]),
        lambda: nn.ModuleDict({"attention": Inner(), "mlp": Single(), "norm": nn.LayerNorm(4)}),
    ],
    ids=["list", "dict"],
)
def test_of_lists_that_nobody_calls_what_they_hold_is_inferred(layer: Callable[[], nn.Module]) -> None:
    """Layers of attention and MLP without a class of their own; what of them is small stays as it is."""
    regions = inferred_regions(component(layers=nn.ModuleList([layer() for _ in range(12)])))
    assert Counter(region.cls for region in regions) == {"Inner": 12, "Single": 12}
    assert [region.path.partition(".")[0] for region in regions] == ["layers"] * 24


def test_lists_of_unlike_lists_are_searched_one_by_one() -> None:
    down, up = nn.ModuleList([Block(), Block()]), nn.ModuleList([Inner(), nn.LayerNorm(4)])
    assert found(inferred_regions(component(stages=nn.ModuleList([down, up])))) == [
        ("stages.0.0", "Block"),
        ("stages.0.1", "Block"),
    ]


def test_an_offloaded_list_of_lists_has_no_members_to_call() -> None:
    model = component(layers=nn.ModuleList([nn.ModuleList([Single()])]), others=nn.ModuleList([Block()]))
    assert found(declared_regions(model, ["Block"], ["layers"])) == [("others.0", "Block")]


def test_what_is_beside_the_model_neither_counts_nor_has_blocks() -> None:
    vae = component(stages=nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)]))
    model = component(codec=vae, blocks=nn.ModuleList([Block(), Block()]))
    assert {region.cls for region in inferred_regions(model)} == {"Linear"}
    assert {region.cls for region in inferred_regions(model, [vae])} == {"Block"}


def test_a_list_with_less_than_a_tenth_of_the_parameters_stays_out() -> None:
    model = component(
        blocks=nn.ModuleList([nn.Linear(32, 32) for _ in range(4)]), tiny=nn.ModuleList([Inner(), Inner()])
    )
    assert {region.cls for region in inferred_regions(model)} == {"Linear"}


def test_a_path_that_ends_in_none_is_an_optional_component_and_one_that_breaks_off_is_missing() -> None:
    model: Any = component(language_model=component(model=Single()))
    model.transformer_2 = None
    assert resolve(model, "language_model.model") is model.language_model.model
    assert resolve(model, "transformer_2") is None
    assert missing_part(model, "language_model.model") is None
    assert missing_part(model, "transformer_2") is None
    assert missing_part(model, "language_model.layers.0") == "Module has no attribute 'layers'"


def test_a_part_of_a_pipeline_that_is_no_module_is_looked_into_once() -> None:
    class Policy:
        """As GR00T's: it holds the model, and is no module."""

        def __init__(self) -> None:
            self.model = Single()
            self.vae = Single()
            self.deeper = SimpleNamespace(model=Single())

    model: Any = component(text_encoder=Single())
    model.policy = Policy()
    model.scheduler = SimpleNamespace(model=Single())
    assert [path for path, _ in denoising_modules(model)] == ["policy.model"]


def test_a_declared_name_may_be_that_of_the_list() -> None:
    model = component(layers=nn.ModuleList([Single(), Single()]), other=nn.ModuleList([Single()]))
    assert found(declared_regions(model, ["layers"])) == [("layers.0", "Single"), ("layers.1", "Single")]


def test_encoders_and_vaes_are_not_what_denoises() -> None:
    model: Any = component(
        policy=Single(),
        vae=Single(),
        text_encoder=Single(),
        image_encoder_2=Single(),
        qwen=Single(),
        vision_tower=Single(),
    )
    assert [name for name, _ in denoising_modules(model, [model.qwen])] == ["policy"]
