"""Settings, and names that nearly are ours."""

from __future__ import annotations

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_diffusion_compile.errors import SettingError
from vllm_omni_diffusion_compile.settings import NAMES, DiffusionCompileSettings, refuse_near_misses


def test_the_defaults_are_those_of_the_release_and_vae_on() -> None:
    assert DiffusionCompileSettings().model_dump() == {
        "diffusion_compile_granularity": "regional",
        "diffusion_compile_dynamic": True,
        "diffusion_compile_vae": True,
    }


@pytest.mark.parametrize(
    "wrong", [{"diffusion_compile_vae": "yes"}, {"diffusion_compile_vae": 1}, {"diffusion_compile": 1}]
)
def test_wrong_values_and_unknown_names_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(pydantic.ValidationError, match=next(iter(wrong))):
        DiffusionCompileSettings.model_validate(wrong)


@given(st.sampled_from(NAMES), st.integers(min_value=0, max_value=40), st.characters(categories=["Ll"]))
def test_one_typing_error_is_always_found(name: str, at: int, letter: str) -> None:
    at %= len(name)
    for typed in (name[:at] + name[at + 1 :], name[:at] + letter + name[at:], name[:at] + letter + name[at + 1 :]):
        if typed not in NAMES:
            with pytest.raises(SettingError, match="did you mean"):
                refuse_near_misses([typed])


@pytest.mark.parametrize(
    "name", ["enforce_eager", "compilation_config", "vae_use_tiling", "diffusion_load_format", "model"]
)
def test_other_names_of_the_host_are_left_to_it(name: str) -> None:
    refuse_near_misses([name, *NAMES])


def test_a_setting_that_a_later_release_has_of_its_own_is_known() -> None:
    with pytest.raises(SettingError):
        refuse_near_misses(["diffusion_compile_backend"])
    refuse_near_misses(["diffusion_compile_backend"], known=["diffusion_compile_backend"])
