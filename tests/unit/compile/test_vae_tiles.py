"""A VAE that decodes in tiles: one tile is compiled, however many there are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from vllm_omni_diffusion_compile.compile.fallback import compile_with_fallback
from vllm_omni_diffusion_compile.compile.latch import Latch
from vllm_omni_diffusion_compile.compile.vae import compile_decodes

TILE = 4


class Decoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(TILE, TILE)

    def forward(self, tile: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(tile).tanh()
        return out


class TiledVae(torch.nn.Module):
    """Decodes as diffusers' VAEs do; a tile is `TILE` wide, and neighbours are blended over a column."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder()

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        return self.tiled_decode(z) + 1

    def tiled_decode(self, z: torch.Tensor) -> torch.Tensor:
        tiles = []
        for start in range(0, z.shape[-1], TILE):
            tiles.append(self.decoder(z[..., start : start + TILE]))  # noqa: PERF401 - as diffusers has it
        joined = []
        for index, tile in enumerate(tiles):
            joined.append(self.blend_h(tiles[index - 1], tile, 1) if index else tile)
        return torch.cat(joined, dim=-1)

    def blend_h(self, a: torch.Tensor, b: torch.Tensor, blend_extent: int) -> torch.Tensor:
        for x in range(blend_extent):
            b[..., x] = (a[..., -blend_extent + x] + b[..., x]) / 2
        return b


def compiled(function: Callable[..., Any], label: str, **_: Any) -> tuple[Callable[..., Any], bool]:
    def failed(failure: object) -> None:
        pytest.fail(f"{label}: {failure}")

    return compile_with_fallback(
        function, Latch(label, failed), on_setup_failure=failed, compile_options={"backend": "eager"}
    )


@pytest.fixture
def vae() -> TiledVae:
    torch._dynamo.reset()
    counters.clear()
    component = TiledVae()
    compile_decodes(SimpleNamespace(vae=component, _vae_modules=["vae"]), compiled, left_alone={})
    return component


def test_more_tiles_compile_nothing_more(vae: TiledVae) -> None:
    eager = copy.deepcopy(vae)
    captured = []
    with torch.inference_mode():
        for tiles in (2, 3, 9, 5):
            z = torch.randn(2, 3, tiles * TILE)
            reference = TiledVae.decode(eager, z.clone())
            torch.testing.assert_close(vae.decode(z), reference)
            captured.append(counters["stats"]["calls_captured"])
    assert captured[0] == 3  # linear, tanh, and the addition in decode
    assert len(set(captured[1:])) == 1, "compiled more for more tiles"  # the second width compiles both as dynamic


def test_a_copy_decodes_with_its_own_weights(vae: TiledVae) -> None:
    other = copy.deepcopy(vae)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
        assert torch.equal(other.tiled_decode(torch.ones(1, 1, TILE)), torch.zeros(1, 1, TILE))
