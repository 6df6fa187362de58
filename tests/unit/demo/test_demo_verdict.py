from __future__ import annotations

import dataclasses

import pytest

from tests.unit.demo.figures import OURS, STOCK, with_flags
from tools.demo.arms import SIZES, Measured, arms
from tools.demo.trace import Counts
from tools.demo.verdict import Expected, expected, problems, sentences
from vllm_omni_diffusion_compile.warmup.plan import FIRST, FURTHER


def compiled(measured: Measured, **changed: int) -> Measured:
    return dataclasses.replace(measured, compiled=dataclasses.replace(measured.compiled, **changed))


def test_the_sizes_are_those_that_the_warmup_plan_comes_to_first() -> None:
    assert (FIRST, FURTHER[0]) == SIZES
    assert [str(size) for size in SIZES] == ["512x512", "768x640"]


def test_good_numbers_and_a_slow_stock_are_no_problem() -> None:
    assert problems(OURS) == []
    assert problems(STOCK) == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"after": 1}, "1 compilation"),
        ({"transformer_functions": 0}, "no function of the transformer"),
        ({"vae_functions": 0}, "no VAE decode"),
    ],
)
def test_what_torch_counts_is_held_against_us(changed: dict[str, int], message: str) -> None:
    (problem,) = problems(compiled(OURS, **changed))
    assert message in problem


def test_no_region_in_the_log_is_a_problem() -> None:
    (problem,) = problems(dataclasses.replace(OURS, regions=0))
    assert "no regionally compiled module" in problem


def test_what_the_user_switched_off_is_not_missed() -> None:
    without_vae = compiled(with_flags("--no-diffusion-compile-vae"), after=4, vae_functions=0)
    assert problems(without_vae) == []
    eager = dataclasses.replace(with_flags("--enforce-eager"), regions=0, compiled=Counts(0, 0, 0, 0))
    assert problems(eager) == []
    full = dataclasses.replace(with_flags("--diffusion-compile-granularity", "full"), regions=0)
    assert problems(full) == []


def test_what_the_user_left_on_is_still_missed() -> None:
    (problem,) = problems(compiled(with_flags("--no-diffusion-compile-vae"), transformer_functions=0))
    assert "no function of the transformer" in problem


@pytest.mark.parametrize(
    ("flags", "result"),
    [
        ([], Expected()),
        (["--seed", "3", "--no-diffusion-compile-dynamic"], Expected()),
        (["--no-diffusion-compile-vae"], Expected(vae=False)),
        (["--no_diffusion_compile_vae"], Expected(vae=False)),
        (["--no-diffusion-compile-vae", "--diffusion-compile-vae"], Expected()),
        (["--diffusion-compile-granularity=full"], Expected(regional=False)),
        (["--diffusion_compile_granularity", "full"], Expected(regional=False)),
        (["--enforce-eager"], Expected(compiled=False, regional=False, vae=False)),
        (["--diffusion-compile-granularity"], Expected()),
    ],
)
def test_expectations_follow_the_flags(flags: list[str], result: Expected) -> None:
    assert expected(flags) == result


def test_the_sentences_are_made_of_the_numbers() -> None:
    stock, ours, ready = sentences(OURS, STOCK)
    assert stock == (
        "Stock vLLM-Omni: 4 compilations ran after the server was ready; the first request took 11.5 s at 512x512 "
        "(median of the next ones: 0.20 s), 11.6 s at 768x640 (median of the next ones: 0.40 s)."
    )
    assert ours == (
        "With this package nothing was compiled after the server was ready; the first request took 0.2 s at 512x512 "
        "(median of the next ones: 0.18 s), 0.4 s at 768x640 (median of the next ones: 0.36 s)."
    )
    assert ready == "Ready after 120 s with this package, after 40 s without it."


def test_the_users_flags_reach_our_arm_only_and_come_last() -> None:
    ours, stock = arms(["--diffusion-compile-dynamic"], everything=False)
    assert ours.flags == ("--no-diffusion-compile-dynamic", "--diffusion-compile-dynamic")
    assert stock.flags == ("--no-diffusion-compile-dynamic",)


def test_stock_has_our_platform_and_nothing_else_of_ours() -> None:
    for arm in arms([], everything=True):
        assert ("diffusion_compile" in arm.plugins.split(",")) == arm.ours
        assert "diffusion_cpu" in arm.plugins.split(",")


def test_the_words_say_that_the_warmup_is_off_as_well() -> None:
    assert "the warmup requests" in sentences(with_flags("--no-diffusion-compile-vae"), STOCK)[-1]
