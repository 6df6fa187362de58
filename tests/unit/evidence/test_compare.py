"""Whether two runs agree, as figures."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_omni_diffusion_compile.errors import EvidenceError
from vllm_omni_diffusion_compile.evidence.compare import figure, figures

RANDOM = np.random.default_rng(0)
EXACT = RANDOM.standard_normal((2, 3, 64)).astype(np.float32)
NOISE = RANDOM.standard_normal(EXACT.shape).astype(np.float32)
OTHER_NOISE = RANDOM.standard_normal(EXACT.shape).astype(np.float32)


@pytest.mark.parametrize(("error", "holds"), [(0.0, True), (5e-5, True), (2e-4, False)])
def test_fp32_is_held_to_its_scale(error: float, holds: bool) -> None:
    subject = EXACT.copy()
    subject[0, 0, 0] += error * np.abs(EXACT).max()
    assert figure("component", "transformer", subject, EXACT).holds is holds


@pytest.mark.parametrize(("factor", "holds"), [(0.5, True), (1.4, True), (1.6, False)])
def test_bf16_is_held_to_eagers_distance_from_fp32(factor: float, holds: bool) -> None:
    found = figure("latents", "call 2", EXACT + factor * 1e-2 * OTHER_NOISE, EXACT + 1e-2 * NOISE, EXACT)
    assert found.holds is holds
    assert found.value == pytest.approx(factor, rel=0.1)


def test_what_carries_errors_along_is_held_for_each_call_and_more_strictly_over_all() -> None:
    names = [f"latents/x of call {number}" for number in range(1, 5)]
    exact = dict.fromkeys(names, EXACT)
    oracle = dict.fromkeys(names, EXACT + 1e-2 * NOISE)

    def compared(*factors: float) -> dict[str, bool]:
        subject = {name: EXACT + f * 1e-2 * OTHER_NOISE for name, f in zip(names, factors, strict=True)}
        return {item.name: item.holds for item in figures(subject, oracle, exact)}

    assert all(compared(1.0, 1.0, 1.0, 1.8).values())
    assert compared(1.0, 1.0, 1.0, 2.2) == {f"x of call {n}": n < 4 for n in range(1, 5)} | {"all calls": True}
    assert [name for name, holds in compared(1.7, 1.7, 1.7, 1.7).items() if not holds] == ["all calls"]


def test_what_is_decoded_carries_errors_along_and_the_denoiser_does_not() -> None:
    names = ("component/transformer", "component/vae", "latents/decoded by vae")
    subject = dict.fromkeys(names, EXACT + 1.7e-2 * OTHER_NOISE)
    found = figures(subject, dict.fromkeys(names, EXACT + 1e-2 * NOISE), dict.fromkeys(names, EXACT))
    assert {item.name: item.bound for item in found} == {
        "transformer": 1.5, "vae": 2.0, "decoded by vae": 2.0, "all calls": 1.5,
    }  # fmt: skip


def test_what_the_oracle_computes_in_fp32_is_held_to_its_scale() -> None:
    subject = EXACT + 1e-3 * NOISE
    assert not figure("component", "text_encoder", subject, EXACT, EXACT).holds


def test_pixels_may_fall_to_the_next_level() -> None:
    picture = RANDOM.integers(1, 255, (8, 8, 3), dtype=np.uint8)
    assert figure("artefact", "picture", picture + np.uint8(1), picture).holds
    assert not figure("artefact", "picture", picture + np.uint8(2), picture).holds
    assert not figure("artefact", "picture", np.full_like(picture, 255), np.zeros_like(picture)).holds


def test_a_repetition_is_the_same_to_the_bit() -> None:
    near = EXACT + 1e-7 * NOISE
    assert figure("component", "transformer", EXACT, EXACT, EXACT + 1e-2 * NOISE, same=True).holds
    assert not figure("component", "transformer", near, EXACT, EXACT + 1e-2 * NOISE, same=True).holds


def test_rows_of_padding_are_not_compared_and_others_are() -> None:
    padded = np.concatenate([EXACT, np.zeros((2, 2, 64), np.float32)], axis=1)
    assert figure("latents", "call 1", padded, EXACT).value == 0
    padded[0, 4, 0] = 1
    with pytest.raises(EvidenceError, match="they did not do the same"):
        figure("latents", "call 1", padded, EXACT)


def test_no_number_is_no_agreement() -> None:
    subject = EXACT.copy()
    subject[0, 0, 0] = np.nan
    with pytest.raises(EvidenceError, match="no numbers"):
        figure("component", "transformer", subject, EXACT)


def test_arrays_are_compared_as_what_they_are() -> None:
    names = ("component/vae", "latents/decoded by vae", "artefact 1")
    found = figures(dict.fromkeys(names, EXACT), dict.fromkeys(names, EXACT), None)
    assert [(item.seen, item.name) for item in found] == [
        ("component", "vae"), ("latents", "decoded by vae"), ("artefact", "artefact 1"),
    ]  # fmt: skip


def test_what_only_one_run_did_is_named() -> None:
    with pytest.raises(EvidenceError, match="not seen in all runs: latents/x of call 2"):
        figures({"component/vae": EXACT}, {"component/vae": EXACT, "latents/x of call 2": EXACT}, None)
