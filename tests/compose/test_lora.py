"""LoRA adapters that requests switch between: each kind of forward is compiled once, however often they switch."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.compose.engine import MARKS, SAME_PICTURE_DB, Engine, assert_same, psnr_db
from vllm_omni_diffusion_compile.compile.events import LOG
from vllm_omni_diffusion_compile.upstream import reporting

pytestmark = MARKS

WIDTH = 128  # of the tiny Klein's hidden states
# Layer to its outputs and inputs: one that packs three projections, and one of the other class of block.
LAYERS = {
    "transformer_blocks.{}.attn.to_q": (WIDTH, WIDTH),
    "transformer_blocks.{}.attn.to_v": (WIDTH, WIDTH),
    "single_transformer_blocks.{}.attn.to_out": (WIDTH, 3 * WIDTH),
}
# By name, so that the order of requests can be read: two of one rank, one of a higher rank, one that fits into the same
# buffers as the first two; and none.
RANKS = {"a": 4, "b": 4, "c": 16, "d": 7}
WARM = (None, "a", None, "b", None)
# Ten switches and more.
SWITCHES = ("a", "b", "a", None, "b", "a", "b", None, "b", "a", None, "a", "b")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Any]:
    """Requests for adapters, by name; None asks for none."""
    from vllm.lora.request import LoRARequest

    folder = tmp_path_factory.mktemp("adapters")
    requests: dict[str | None, Any] = {None: None}
    for number, (name, rank) in enumerate(RANKS.items(), start=1):
        _write_adapter(folder / name, rank, seed=number)
        requests[name] = LoRARequest(name, number, str(folder / name))
    return requests


def _write_adapter(folder: Path, rank: int, seed: int) -> None:
    folder.mkdir()
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for layer, (outputs, inputs) in LAYERS.items():
        for block in range(2):
            name = f"base_model.model.transformer.{layer.format(block)}"
            weights[f"{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=random).bfloat16()
            weights[f"{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=random).bfloat16()
    save_file(weights, folder / "adapter_model.safetensors")
    targets = sorted({layer.rsplit(".", 1)[1] for layer in LAYERS})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def eager(klein: Path, adapters: dict[str | None, Any]) -> dict[str | None, np.ndarray]:
    """What each adapter draws, eagerly."""
    with Engine(klein, compiled=False, max_cpu_loras=len(RANKS)) as engine:
        drawn = {name: engine.draw(lora_request=adapter) for name, adapter in adapters.items()}
    names = list(drawn)
    for index, name in enumerate(names):
        for other in names[:index]:
            assert psnr_db(drawn[name], drawn[other]) < SAME_PICTURE_DB, f"{name} and {other} draw the same picture"
    return drawn


@pytest.mark.parametrize("at_start", [False, True], ids=["per-request", "set-at-start"])
def test_switching_compiles_nothing_more(
    klein: Path, adapters: dict[str | None, Any], eager: dict[str | None, np.ndarray], at_start: bool
) -> None:
    options: dict[str, Any] = {"lora_path": adapters["a"].lora_path} if at_start else {}
    with Engine(klein, compiled=True, max_cpu_loras=len(RANKS), **options) as engine:
        for name in WARM:
            assert_same([engine.draw(lora_request=adapters[name])], [eager[name]])
        warm = engine.graphs
        assert warm > 0
        for name in SWITCHES:
            assert_same([engine.draw(lora_request=adapters[name])], [eager[name]])
        assert engine.graphs == warm, "a switch of adapters compiled more"
        if at_start:
            return
        # A higher rank makes room for all: buffers of another size, compiled once more at most.
        for name in ("c", "a", None, "c"):
            assert_same([engine.draw(lora_request=adapters[name])], [eager[name]])
        grown = engine.graphs
        assert grown <= warm + len(engine.blocks)
        for name in ("b", None, "c", "a", "c"):
            assert_same([engine.draw(lora_request=adapters[name])], [eager[name]])
        assert engine.graphs == grown, "a switch of adapters compiled more after a higher rank"


@pytest.fixture(scope="module")
def drawn(klein: Path, eager: dict[str | None, np.ndarray]) -> tuple[dict[str | None, np.ndarray], np.ndarray]:
    """What each adapter draws, eagerly; and what a server draws, compiled, to which nobody has brought one."""
    with Engine(klein, compiled=True) as engine:
        return eager, engine.draw()


@pytest.mark.parametrize(
    ("declared", "options"),
    [
        pytest.param("a", {}, id="regional"),
        pytest.param("ac", {"diffusion_compile_dynamic": False}, id="static-two-ranks"),
        pytest.param("a", {"diffusion_compile_granularity": "full"}, id="full"),
        pytest.param("a", {"lora_path": "a"}, id="set-at-start"),
    ],
)
def test_nothing_is_compiled_after_ready_where_an_adapter_is_declared(
    klein: Path,
    adapters: dict[str | None, Any],
    drawn: tuple[dict[str | None, np.ndarray], np.ndarray],
    declared: str,
    options: dict[str, Any],
) -> None:
    eager, unadapted = drawn
    LOG.clear()
    if "lora_path" in options:
        options = {"lora_path": adapters[options["lora_path"]].lora_path}
    shapes = [{"width": 128, "height": 128, "lora": {"path": adapters[name].lora_path}} for name in declared]
    settings = {"backend": "eager", "warmup": {"shapes": shapes}}
    with Engine(klein, compiled=True, **options, diffusion_compile_config=settings) as engine:
        report = reporting.latest()
        assert report is not None
        assert [shape["state"] for shape in report["shapes"]] == ["warm"] * (len(declared) + 1)
        warm = engine.graphs
        if not options.keys() & {"diffusion_compile_dynamic", "diffusion_compile_granularity"}:
            # Each class of block with the adapter off and on, and nothing for layers that it replaced.
            again = Counter(event.region for event in LOG.since()[0] if event.kind == "recompilation")
            assert again == dict.fromkeys({type(block).__name__ for block in engine.blocks}, 1)
        # To the bit: the adapter that was warmed with is off.
        assert np.array_equal(engine.draw(), unadapted)
        for name in ("b", "d", None, *declared):
            assert_same([engine.draw(lora_request=adapters[name])], [eager[name]])
        weaker = engine.draw(lora_request=adapters["a"], lora_scale=0.5)
        assert psnr_db(weaker, eager["a"]) < SAME_PICTURE_DB
        assert np.array_equal(engine.draw(), unadapted)
        assert engine.graphs == warm, "something was compiled after ready"
        assert not [event for event in LOG.since()[0] if event.after_ready]
