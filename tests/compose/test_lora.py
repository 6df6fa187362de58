"""LoRA adapters that requests switch between: each kind of forward is compiled once, however often they switch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.compose.engine import MARKS, SAME_PICTURE_DB, Engine, assert_same, psnr_db

pytestmark = MARKS

WIDTH = 128  # of the tiny Klein's hidden states
# Layer to its outputs and inputs: one that packs three projections, and one of the other class of block.
LAYERS = {
    "transformer_blocks.{}.attn.to_q": (WIDTH, WIDTH),
    "transformer_blocks.{}.attn.to_v": (WIDTH, WIDTH),
    "single_transformer_blocks.{}.attn.to_out": (WIDTH, 3 * WIDTH),
}
# By name, so that the order of requests can be read: two of one rank, one of a higher rank, and none.
RANKS = {"a": 4, "b": 4, "c": 16}
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
