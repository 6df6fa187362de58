from __future__ import annotations

import argparse
import itertools

import pytest

from vllm_omni_diffusion_compile.bench.arms import as_flags, check_arguments, given, read_arms
from vllm_omni_diffusion_compile.errors import BenchError

BASES = ("eager", "regional-dynamic", "regional-static", "full-dynamic", "full-static")


def flags(name: str) -> list[str]:
    (arm,) = read_arms([name])
    return as_flags(arm.settings)


def test_an_arm_is_what_its_name_says() -> None:
    assert flags("eager") == ["--enforce-eager"]
    assert flags("regional-dynamic") == [
        *("--diffusion-compile-granularity", "regional", "--diffusion-compile-dynamic", "--no-diffusion-compile-vae"),
    ]
    assert flags("full-static+vae") == [
        *("--diffusion-compile-granularity", "full", "--no-diffusion-compile-dynamic", "--diffusion-compile-vae"),
    ]
    assert flags("eager+rainfusion") == [
        "--enforce-eager",
        "--diffusion-attention-config",
        '{"default": {"backend": "RAINFUSION_ATTN", "block_sparse": {"sparsity": 0.8}}}',
    ]


def test_all_arms_have_names_of_their_own_and_flags_of_their_own() -> None:
    names = [
        base + vae + sparse
        for base, vae, sparse in itertools.product(BASES, ("", "+vae"), ("", "+rainfusion"))
        if (base, vae) != ("eager", "+vae")
    ]
    arms = read_arms(names, "video")
    assert [arm.name for arm in arms] == names
    assert len({tuple(as_flags(arm.settings)) for arm in arms}) == len(names) == 18


def test_short_names_and_any_order_of_what_is_added() -> None:
    (arm,) = read_arms(["full+rainfusion+vae"], "video")
    assert arm.name == "full-dynamic+vae+rainfusion"


@pytest.mark.parametrize(
    ("names", "task", "says"),
    [
        (["eager+vae"], None, "--arm eager\\+vae contradicts itself.*use eager"),
        (["eager-static"], None, "--arm eager-static is no arm; there are eager, regional-dynamic"),
        (["regional+tea"], None, "--arm regional\\+tea is no arm"),
        (["regional+vae+vae"], None, "is no arm"),
        (["regional", "eager", "regional-dynamic"], None, "is regional-dynamic, which is there twice"),
        (["regional+rainfusion"], "image", "this model makes images; leave \\+rainfusion out"),
    ],
)
def test_arms_that_cannot_be(names: list[str], task: str | None, says: str) -> None:
    with pytest.raises(BenchError, match=says):
        read_arms(names, task)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--enforce-eager", "--enforce-eager after -- is what the arms differ in"),
        ("--no-diffusion-compile-vae", "--no-diffusion-compile-vae after -- is what the arms differ in"),
        ("--diffusion_compile_granularity=full", "--diffusion-compile-granularity after --"),
        ("--port 8000", "--port after --: leave it out; the bench takes a free one"),
        ("--api-key secret", "set VLLM_API_KEY"),
        ("""--diffusion-compile-config {"cache_dir":"x"}""", "cache_dir after --: every arm has a private one"),
        ("--diffusion-compile-config.cache_dir x", "cache_dir after --: every arm has a private one"),
        ("--diffusion-compile-config.warmup.shapes 64x64", "warmup.shapes after --: what --shape names is declared"),
        ("stray --dtype float32", "'stray' after -- belongs to no flag"),
    ],
)
def test_arguments_that_contradict_the_arms(arguments: str, says: str) -> None:
    with pytest.raises(BenchError, match=says):
        check_arguments(arguments.split(), read_arms(["eager", "regional"]))


def test_attention_is_refused_only_where_an_arm_decides_it() -> None:
    arguments = ["--diffusion-attention-config", '{"default": {"backend": "TORCH_SDPA"}}']
    check_arguments(arguments, read_arms(["eager", "regional"]))
    with pytest.raises(BenchError, match="--diffusion-attention-config after --"):
        check_arguments(arguments, read_arms(["eager", "eager+rainfusion"]))


def test_flags_become_keyword_arguments_offline() -> None:
    arguments = "--trust-remote-code --dtype bfloat16 --tensor-parallel-size=2 --no-x --diffusion-compile-config.mode m"
    assert given([*arguments.split(), "--diffusion-compile-config", '{"on_failure": "raise"}', "--ids", "1", "2"]) == {
        "trust_remote_code": True,
        "dtype": "bfloat16",
        "tensor_parallel_size": 2,
        "x": False,
        "diffusion_compile_config": {"mode": "m", "on_failure": "raise"},
        "ids": [1, 2],
    }


def test_flags_are_what_argparse_reads_back() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--on", action=argparse.BooleanOptionalAction)
    parser.add_argument("--off-then", action=argparse.BooleanOptionalAction)
    parser.add_argument("--name")
    read = parser.parse_args(as_flags({"on": True, "off_then": False, "name": "x"}))
    assert vars(read) == {"on": True, "off_then": False, "name": "x"}
