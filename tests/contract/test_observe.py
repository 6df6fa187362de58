"""A pipeline that is watched computes as ever, and is as before afterwards."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from vllm_omni.diffusion.attention.backends.registry import DiffusionAttentionBackendEnum
from vllm_omni.diffusion.data import AttentionConfig

from vllm_omni_diffusion_compile.upstream.asked import not_as_asked
from vllm_omni_diffusion_compile.upstream.observe import InFp32, Observed

pytestmark = pytest.mark.contract

WIDTH = 16


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        rows = self.linear(hidden_states + text) * timestep
        mixed: torch.Tensor = nn.functional.scaled_dot_product_attention(rows, rows, rows)
        return mixed


class Encoder(nn.Module):
    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"last": tokens.bfloat16()[..., None].expand(1, 4, WIDTH), "others": tokens.float()}


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3)

    def decode(self, latents: torch.Tensor, return_dict: bool = True) -> tuple[torch.Tensor]:
        return (self.linear(latents),)


class Pipeline(nn.Module):
    _dit_modules = ("transformer",)
    _vae_modules = ("vae",)
    _encoder_modules = ("text_encoder",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.transformer, self.vae, self.text_encoder = Transformer(), Vae(), Encoder()

    def forward(self) -> torch.Tensor:
        latents = torch.linspace(-1, 1, 4 * WIDTH).reshape(1, 4, WIDTH).to(self.transformer.linear.weight.dtype)
        text = self.text_encoder(torch.arange(4)[None])["last"].to(latents.dtype)
        for step in (1.0, 0.5):
            latents = latents - self.transformer(
                hidden_states=latents, timestep=torch.full((1, 1, 1), step, dtype=latents.dtype), text=text
            )
        decoded: torch.Tensor = self.vae.decode(latents.to(self.vae.linear.weight.dtype), return_dict=False)[0]
        return decoded


def _watched(pipeline: Pipeline, file: Path, **options: Any) -> tuple[torch.Tensor, dict[str, Any], dict[str, Any]]:
    observed = Observed(pipeline, **options)
    with torch.no_grad():
        picture = pipeline()
    facts = observed.finish(file)
    with np.load(file) as arrays:
        return picture, facts, dict(arrays)


@pytest.fixture
def pipeline() -> Pipeline:
    return Pipeline()


@pytest.mark.parametrize("full", [False, True], ids=["eager", "full"])
def test_nothing_changes_and_everything_is_seen(pipeline: Pipeline, tmp_path: Path, full: bool) -> None:
    if full:
        pipeline.transformer.compile(backend="eager")
    call = pipeline.transformer._compiled_call_impl
    with torch.no_grad():
        before = pipeline()
    picture, facts, arrays = _watched(pipeline, tmp_path / "seen.npz")
    assert torch.equal(picture, before)
    assert set(arrays) == {
        "component/text_encoder", "component/transformer", "component/vae", "latents/decoded by vae",
        "latents/transformer.hidden_states of call 1", "latents/transformer.hidden_states of call 2",
    }  # fmt: skip
    with torch.no_grad():
        step = pipeline.transformer(
            torch.from_numpy(arrays["latents/transformer.hidden_states of call 1"]), torch.ones(1, 1, 1),
            torch.from_numpy(arrays["component/text_encoder"]),
        )  # fmt: skip
    np.testing.assert_allclose(arrays["component/transformer"], step, rtol=1e-6)
    np.testing.assert_array_equal(arrays["component/vae"], picture)
    assert facts["operators"]["aten::scaled_dot_product_attention"] == 2
    assert facts["compiled_calls"] == (2 if full else 0)
    assert pipeline.transformer._compiled_call_impl is call, "what calling it does is not put back"
    assert "decode" not in vars(pipeline.vae)
    torch.compiler.reset()


@pytest.mark.parametrize("compiled", [False, True])
def test_decode_that_is_compiled_is_told_from_a_denoiser_that_is(
    pipeline: Pipeline, tmp_path: Path, compiled: bool
) -> None:
    part = pipeline.vae if compiled else pipeline.transformer
    if compiled:
        object.__setattr__(part, "decode", torch.compile(pipeline.vae.decode, backend="eager"))
    else:
        part.compile(backend="eager")
    _, facts, _ = _watched(pipeline, tmp_path / "seen.npz")
    assert (facts["compiled_calls"], facts["decode_compiled_calls"]) == ((0, 1) if compiled else (2, 0))
    torch.compiler.reset()


def _layer(backend: str, role: str = "self") -> Any:
    chosen = DiffusionAttentionBackendEnum[backend].get_class()
    made = chosen.get_impl_cls()
    return SimpleNamespace(role=role, attn_backend=chosen, attention=object.__new__(made))


# SDPA on CUDA, as a profile has it: its dispatcher's operators, and a kernel.
ON_CUDA = {
    "aten::scaled_dot_product_attention": 2, "aten::_flash_attention_forward": 2,
    "void pytorch_flash::flash_fwd_kernel<...>": 2,
}  # fmt: skip
SDPA, FLASH = {"aten::_scaled_dot_product_flash_attention": 2}, {"flash_attn::_flash_attn_forward": 2}


@pytest.mark.parametrize(
    ("config", "layers", "operators", "said"),
    [
        ({"default": "TORCH_SDPA"}, ["TORCH_SDPA"], SDPA, ()),
        ({"default": "FLASH_ATTN"}, ["FLASH_ATTN"], FLASH, ()),
        # Beside SDPA of the model's own.
        ({"default": "FLASH_ATTN"}, ["FLASH_ATTN"], SDPA | FLASH, ()),
        ({"default": "FLASH_ATTN", "per_role": {"cross": "TORCH_SDPA"}}, ["FLASH_ATTN", "cross"], SDPA | FLASH, ()),
        ({}, ["TORCH_SDPA"], FLASH, ()),
        (
            {"default": "FLASH_ATTN"}, ["TORCH_SDPA", "TORCH_SDPA"], SDPA,
            ("FLASH_ATTN was asked for, and 2 attention layer(s) of the role 'self' have SDPAImpl",
             "FLASH_ATTN was asked for, and only aten::_scaled_dot_product_flash_attention ran"),
        ),
        ({"default": "FLASH_ATTN"}, ["FLASH_ATTN"], ON_CUDA | {"void cutlass::device_kernel<flash::...>": 2}, ()),
        (
            {"default": "FLASH_ATTN"}, ["FLASH_ATTN"], ON_CUDA,
            (f"FLASH_ATTN was asked for, and only {', '.join(ON_CUDA)} ran",),
        ),
        # As vLLM-Omni does for fp32.
        (
            {"default": "FLASH_ATTN"}, ["FLASH_ATTN"], SDPA,
            ("FLASH_ATTN was asked for, and only aten::_scaled_dot_product_flash_attention ran",),
        ),
        (
            {"default": "TORCH_SDPA"}, ["TORCH_SDPA"], FLASH,
            ("TORCH_SDPA was asked for, and no scaled_dot_product operator ran, but flash_attn::_flash_attn_forward",),
        ),
    ],
)  # fmt: skip
def test_attention_that_is_not_what_was_named_is_said(
    config: dict[str, Any], layers: list[str], operators: dict[str, int], said: tuple[str, ...]
) -> None:
    loaded = [_layer("TORCH_SDPA", "cross") if name == "cross" else _layer(name) for name in layers]
    assert tuple(not_as_asked(loaded, AttentionConfig(**config), operators)) == said


def test_a_layer_with_a_kernel_of_the_models_own_is_no_contradiction() -> None:
    own = SimpleNamespace(role="self", attn_backend=None, attention=nn.Identity())
    assert not not_as_asked([own], AttentionConfig(default="FLASH_ATTN"), SDPA)


def test_the_reference_in_fp32_is_nearer_to_the_truth(pipeline: Pipeline, tmp_path: Path) -> None:
    pipeline.bfloat16()
    exact = Pipeline()
    exact.load_state_dict(pipeline.state_dict())
    with torch.no_grad():
        truth, rounded = exact(), pipeline()
    picture, _, _ = _watched(pipeline, tmp_path / "seen.npz", in_fp32=True)
    assert picture.dtype is torch.float32
    assert (picture - truth).abs().max() < 1e-5 < (rounded - truth).abs().max()


def test_random_numbers_are_drawn_in_the_type_that_is_asked_for() -> None:
    torch.manual_seed(0)
    asked = torch.randn(64, dtype=torch.bfloat16)
    torch.manual_seed(0)
    with InFp32():  # type: ignore[no-untyped-call]
        drawn = torch.randn(64, dtype=torch.bfloat16)
        cast = torch.ones(4).to(torch.bfloat16)
    assert drawn.dtype is torch.float32 and torch.equal(drawn, asked.float())
    assert cast.dtype is torch.float32
