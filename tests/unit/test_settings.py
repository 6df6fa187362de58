"""Settings, and names that nearly are ours."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_diffusion_compile.errors import SettingError
from vllm_omni_diffusion_compile.settings import (
    KEYS,
    NAMES,
    DiffusionCompileConfig,
    DiffusionCompileSettings,
    effective_recompile_limit,
    merged,
    plain_config,
    read_config,
    refuse_near_misses,
)


def test_the_defaults_are_those_of_the_release_and_vae_on() -> None:
    assert DiffusionCompileSettings().model_dump() == {
        "diffusion_compile_granularity": "regional",
        "diffusion_compile_dynamic": True,
        "diffusion_compile_vae": True,
        "diffusion_compile_config": {
            "backend": "auto",
            "mode": "default",
            "on_failure": "eager",
            "infer_regions": True,
            "recompile_limit": None,
            "vae_policy": "measure",
            "vae_scope": "decode",
            "cache_dir": None,
            "warmup": {"shapes": [], "budget_s": None, "on_failure": "serve", "report_path": None},
            "rainfusion_executor": "auto",
            "pad_seq_buckets": None,
            "require_evidence": None,
        },
    }


@pytest.mark.parametrize(
    "wrong", [{"diffusion_compile_vae": "yes"}, {"diffusion_compile_vae": 1}, {"diffusion_compile": 1}]
)
def test_wrong_values_and_unknown_names_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(pydantic.ValidationError, match=next(iter(wrong))):
        DiffusionCompileSettings.model_validate(wrong)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"backend": "eager"},
        {"backend": "my-compiler"},
        {"backend": "package.module:callable"},
        {"backend": "package.module:Class.method"},
        {"backend": "package.module.callable", "on_failure": "raise"},
        {"backend": "inductor", "mode": "max-autotune-no-cudagraphs"},
        {"mode": "max-autotune-no-cudagraphs", "infer_regions": False, "recompile_limit": 1},
        {"backend": "eager", "mode": "default", "recompile_limit": None},
        {"pad_seq_buckets": [16384, 32768]},
        {"pad_seq_buckets": {"lengths": [16384, 32768], "over": "reject"}},
        {"pad_seq_buckets": {"from": 16384, "to": 65536, "waste": 0.06}},
    ],
)
def test_a_good_mapping_is_kept_as_it_was_given(config: dict[str, Any]) -> None:
    assert plain_config(config) == config
    assert json.loads(json.dumps(plain_config(config))) == config
    assert plain_config(read_config(config)) == config
    assert read_config(json.loads(read_config(config).model_dump_json())) == read_config(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"mode": "reduce-overhead"}, "mode is 'reduce-overhead', which uses CUDA graphs.*max-autotune-no-cudagraphs"),
        ({"mode": "max-autotune"}, "mode is 'max-autotune', which uses CUDA graphs.*max-autotune-no-cudagraphs"),
        ({"backend": "cudagraphs"}, "backend is 'cudagraphs', which uses CUDA graphs.*use 'inductor'"),
        ({"mode": "fast"}, "mode is 'fast' .str., expected 'default' or 'max-autotune-no-cudagraphs'; leave it out"),
        ({"mode": None}, "mode is None, expected 'default'"),
        ({"on_failure": "stop"}, "on_failure is 'stop' .str., expected 'eager' or 'raise'"),
        ({"backend": 3}, "backend is 3, expected a text"),
        ({"infer_regions": "yes"}, "infer_regions is 'yes' .str., expected true or false"),
        ({"infer_regions": 1}, "infer_regions is 1, expected true or false"),
        ({"recompile_limit": 0}, "recompile_limit is 0, expected at least 1"),
        ({"recompile_limit": True}, "recompile_limit is True, expected a whole number"),
        ({"recompile_limit": "8"}, "recompile_limit is '8' .str., expected a whole number"),
        ({"recompile_limit": 8.0}, "recompile_limit is 8.0, expected a whole number"),
    ],
)
def test_a_wrong_value_is_refused_with_what_was_found_and_expected(config: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=f"^diffusion_compile_config.{message}"):
        read_config(config)
    with pytest.raises(SettingError, match=f"^--diffusion-compile-config.{message}"):
        read_config(config, "--diffusion-compile-config")


@pytest.mark.parametrize("backend", ["", ".", "a.", ".a", "a:", ":a", "a b", "a:b:c", "1a", "a/b.py", "a..b"])
def test_a_backend_is_a_name_or_a_dotted_path(backend: str) -> None:
    with pytest.raises(SettingError, match="backend is .*neither a name nor a dotted path.*package.module:callable"):
        read_config({"backend": backend})


def test_a_mode_for_another_compiler_than_inductor_is_refused() -> None:
    with pytest.raises(
        SettingError, match="mode is 'max-autotune-no-cudagraphs' and backend is 'eager'.*leave mode out"
    ):
        read_config({"backend": "eager", "mode": "max-autotune-no-cudagraphs"})


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("on-failure", "did you mean 'on_failure'"),
        ("modes", "did you mean 'mode'"),
        ("recompile_limt", "did you mean 'recompile_limit'"),
        ("xyz", "Known: backend, mode"),
        ("dynamic", "'diffusion_compile_dynamic' is a setting of its own"),
        ("diffusion_compile_vae", "'diffusion_compile_vae' is a setting of its own"),
        (3, "Known: backend"),
    ],
)
def test_an_unknown_key_is_refused_with_what_may_have_been_meant(key: object, hint: str) -> None:
    with pytest.raises(SettingError, match=f"unknown key 'diffusion_compile_config.{key}'; {hint}"):
        read_config({key: True})


def test_every_problem_of_a_mapping_is_named() -> None:
    with pytest.raises(SettingError) as refused:
        read_config({"modus": "x", "on_failure": "y", "recompile_limit": -1})
    assert all(name in str(refused.value) for name in ("modus", "on_failure", "recompile_limit"))


@pytest.mark.parametrize("value", ["default", '{"mode": "default"}', ["mode"], True, 0])
def test_what_is_no_mapping_is_refused(value: object) -> None:
    with pytest.raises(SettingError, match="diffusion_compile_config is .*expected a mapping such as"):
        read_config(value)


def test_settings_are_read_from_whatever_has_their_names() -> None:
    assert DiffusionCompileSettings.of(object()) == DiffusionCompileSettings()
    partly = SimpleNamespace(
        diffusion_compile_dynamic=False, diffusion_compile_vae=None, diffusion_compile_config={"on_failure": "raise"}
    )
    assert DiffusionCompileSettings.of(partly) == DiffusionCompileSettings(
        diffusion_compile_dynamic=False, diffusion_compile_config=DiffusionCompileConfig(on_failure="raise")
    )
    # What was read can be read again.
    assert DiffusionCompileSettings.of(DiffusionCompileSettings.of(partly)) == DiffusionCompileSettings.of(partly)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("diffusion_compile_granularity", "half", "diffusion_compile_granularity is 'half'.*'regional' or 'full'"),
        ("diffusion_compile_vae", "no", "diffusion_compile_vae is 'no' .str., expected true or false"),
        ("diffusion_compile_config", {"mode": "fast"}, "diffusion_compile_config.mode is 'fast'"),
        ("diffusion_compile_config", "fast", "diffusion_compile_config is 'fast'"),
    ],
)
def test_a_wrong_attribute_is_named(name: str, value: object, message: str) -> None:
    with pytest.raises(SettingError, match=f"^{message}"):
        DiffusionCompileSettings.of(SimpleNamespace(**{name: value}))


@pytest.mark.parametrize(
    ("dynamic", "given", "limit"), [(True, None, None), (False, None, 64), (False, 3, 3), (True, 3, 3)]
)
def test_static_shapes_get_more_room_to_recompile(dynamic: bool, given: int | None, limit: int | None) -> None:
    settings = DiffusionCompileSettings(
        diffusion_compile_dynamic=dynamic, diffusion_compile_config=DiffusionCompileConfig(recompile_limit=given)
    )
    assert effective_recompile_limit(settings) == limit


def test_mappings_are_merged_key_by_key() -> None:
    base, over = {"a": 1, "b": {"c": 1, "d": 1}, "e": {}}, {"b": {"c": 2}, "e": 3}
    assert merged(base, over) == {"a": 1, "b": {"c": 2, "d": 1}, "e": 3}
    assert base == {"a": 1, "b": {"c": 1, "d": 1}, "e": {}}


@given(st.sampled_from(NAMES), st.integers(min_value=0, max_value=40), st.characters(categories=["Ll"]))
def test_one_typing_error_is_always_found(name: str, at: int, letter: str) -> None:
    at %= len(name)
    for typed in (name[:at] + name[at + 1 :], name[:at] + letter + name[at:], name[:at] + letter + name[at + 1 :]):
        if typed not in NAMES:
            with pytest.raises(SettingError, match="did you mean"):
                refuse_near_misses([typed])


@given(st.sampled_from(KEYS), st.integers(min_value=0, max_value=40), st.characters(categories=["Ll"]))
def test_one_typing_error_in_a_key_is_always_found(key: str, at: int, letter: str) -> None:
    at %= len(key)
    for typed in (key[:at] + key[at + 1 :], key[:at] + letter + key[at:], key[:at] + letter + key[at + 1 :]):
        if typed not in KEYS:
            with pytest.raises(SettingError, match=f"unknown key .*{typed}.*did you mean '{key}'"):
                read_config({typed: True})


@pytest.mark.parametrize(
    "name",
    [
        "enforce_eager",
        "compilation_config",
        "diffusion_offload_config",
        "vae_use_tiling",
        "diffusion_load_format",
        "model",
    ],
)
def test_other_names_of_the_host_are_left_to_it(name: str) -> None:
    refuse_near_misses([name, *NAMES])


def test_a_setting_that_a_later_release_has_of_its_own_is_known() -> None:
    with pytest.raises(SettingError):
        refuse_near_misses(["diffusion_compile_backend"])
    refuse_near_misses(["diffusion_compile_backend"], known=["diffusion_compile_backend"])
