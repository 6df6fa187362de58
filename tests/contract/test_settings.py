"""Our own settings on every configuration class of the installed vLLM-Omni."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pydantic
import pytest
from vllm_omni.config import omni_config
from vllm_omni.config.omni_config import _DiffusionConfigProjection
from vllm_omni.config.stage_config import (
    StageDeployConfig,
    StageExecutionType,
    _parse_stage_deploy,
    load_deploy_config,
)
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.engine.arg_utils import OrchestratorArgs, internal_blacklist_keys

from vllm_omni_diffusion_compile.errors import SettingError
from vllm_omni_diffusion_compile.settings import DiffusionCompileConfig, DiffusionCompileSettings

pytestmark = pytest.mark.contract
NAME = "diffusion_compile_vae"
CONFIG = "diffusion_compile_config"
SAID: dict[str, Any] = {"mode": "max-autotune-no-cudagraphs", "recompile_limit": 16}
WRONG = (
    ({"mode": "reduce-overhead"}, "diffusion_compile_config.mode is 'reduce-overhead', which uses CUDA graphs"),
    ({"modes": "default"}, "unknown key 'diffusion_compile_config.modes'; did you mean 'mode'"),
    ({"recompile_limit": True}, "diffusion_compile_config.recompile_limit is True, expected a whole number"),
    ({"backend": "eager", "mode": "max-autotune-no-cudagraphs"}, "only inductor has modes"),
    ("default", "diffusion_compile_config is 'default' .str., expected a mapping"),
)


@pytest.fixture(params=[OmniDiffusionConfig, _DiffusionConfigProjection], ids=lambda cls: cls.__name__)
def config_class(request: pytest.FixtureRequest) -> Any:
    return request.param


def make(cls: Any, **values: Any) -> Any:
    return cls(model="tiny", master_port=29511, **values)


def test_it_is_a_field_that_is_on_unless_said_otherwise(config_class: Any) -> None:
    assert [field.default for field in dataclasses.fields(config_class) if field.name == "stage_id"]
    assert NAME in {field.name for field in dataclasses.fields(config_class)}
    assert getattr(make(config_class), NAME) is True
    assert getattr(make(config_class, **{NAME: False}), NAME) is False
    assert getattr(config_class.from_kwargs(model="tiny", master_port=29511, **{NAME: False}), NAME) is False


def test_the_dataclass_machinery_knows_it(config_class: Any) -> None:
    on, off = make(config_class), make(config_class, **{NAME: False})
    assert getattr(dataclasses.replace(on, **{NAME: False}), NAME) is False
    assert on != off
    assert f"{NAME}=False" in repr(off)
    assert getattr(pickle.loads(pickle.dumps(off)), NAME) is False
    assert getattr(copy.deepcopy(off), NAME) is False
    assert dataclasses.asdict(off)[NAME] is False


def test_the_mapping_is_a_field_that_holds_what_was_given(config_class: Any) -> None:
    assert getattr(make(config_class), CONFIG) is None
    assert getattr(make(config_class, **{CONFIG: {}}), CONFIG) == {}
    assert getattr(make(config_class, **{CONFIG: SAID}), CONFIG) == SAID
    from_kwargs = config_class.from_kwargs
    assert getattr(from_kwargs(model="tiny", master_port=29511, **{CONFIG: SAID}), CONFIG) == SAID
    assert getattr(from_kwargs(model="tiny", master_port=29511, **{CONFIG: None}), CONFIG) is None
    assert getattr(make(config_class, **{CONFIG: DiffusionCompileConfig(**SAID)}), CONFIG) == SAID


def test_the_dataclass_machinery_knows_the_mapping(config_class: Any) -> None:
    default, said = make(config_class), make(config_class, **{CONFIG: SAID})
    assert said == make(config_class, **{CONFIG: dict(SAID)}) != default
    assert getattr(dataclasses.replace(default, **{CONFIG: SAID}), CONFIG) == SAID
    assert f"{CONFIG}={SAID!r}" in repr(said)
    assert getattr(pickle.loads(pickle.dumps(said)), CONFIG) == SAID
    assert getattr(copy.deepcopy(said), CONFIG) == SAID
    assert json.loads(json.dumps(dataclasses.asdict(said)[CONFIG])) == SAID


def test_the_settings_are_read_from_what_reaches_the_worker() -> None:
    config = pickle.loads(pickle.dumps(make(OmniDiffusionConfig, diffusion_compile_dynamic=False, **{CONFIG: SAID})))
    settings = DiffusionCompileSettings.of(config)
    assert settings.diffusion_compile_config == DiffusionCompileConfig(**SAID)
    assert settings.diffusion_compile_dynamic is False


@pytest.mark.parametrize(("value", "message"), WRONG)
def test_a_wrong_mapping_is_refused_by_name(config_class: Any, value: object, message: str) -> None:
    error = SettingError if config_class is OmniDiffusionConfig else pydantic.ValidationError
    with pytest.raises(error, match=message):
        make(config_class, **{CONFIG: value})
    with pytest.raises(error, match=message):
        config_class.from_kwargs(model="tiny", **{CONFIG: value})


@pytest.mark.parametrize("value", ["no", 0, 1, None])
def test_omni_diffusion_config_refuses_what_is_no_bool(value: object) -> None:
    with pytest.raises(TypeError, match=NAME):
        make(OmniDiffusionConfig, **{NAME: value})


@pytest.mark.parametrize("value", ["no", 0, 1])
def test_the_projection_refuses_what_is_no_bool(value: object) -> None:
    with pytest.raises(pydantic.ValidationError, match=NAME):
        make(_DiffusionConfigProjection, **{NAME: value})


def test_none_means_unset_where_the_release_says_so_for_its_neighbours(config_class: Any) -> None:
    try:
        expected = config_class.from_kwargs(model="tiny", diffusion_compile_dynamic=None).diffusion_compile_dynamic
    except (TypeError, pydantic.ValidationError) as error:
        with pytest.raises(type(error), match=NAME):
            config_class.from_kwargs(model="tiny", **{NAME: None})
    else:
        assert getattr(config_class.from_kwargs(model="tiny", **{NAME: None}), NAME) is expected


@pytest.mark.parametrize(
    "name",
    [
        "diffusion_compile_vea",
        "diffusion_compile_vaes",
        "diffusion_compile_granlarity",
        "difusion_compile_vae",
        "diffusion_compile_cofig",
        "difusion_compile_config",
    ],
)
def test_a_near_miss_is_refused_by_name(config_class: Any, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}.*did you mean 'diffusion_compile_"):
        config_class.from_kwargs(model="tiny", **{name: True})


def test_the_constructor_refuses_a_near_miss_too(config_class: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="diffusion_compile_vea"):
        config_class(model="tiny", diffusion_compile_vea=True)


def test_other_unknown_names_are_treated_as_the_release_does(release: tuple[int, int], config_class: Any) -> None:
    if release >= (0, 30):
        with pytest.raises(ValueError, match="no_such_setting"):
            config_class.from_kwargs(model="tiny", no_such_setting=1)
    else:
        config_class.from_kwargs(model="tiny", no_such_setting=1)


def test_an_unknown_granularity_is_refused(config_class: Any) -> None:
    with pytest.raises(ValueError, match="diffusion_compile_granularity"):
        make(config_class, diffusion_compile_granularity="half")


@pytest.mark.parametrize(
    ("conflict", "named"),
    [
        ({"enable_cpu_offload": True}, "CPU offload"),
        ({"enable_layerwise_offload": True}, "layerwise offload"),
        ({"enable_distributed_layerwise_offload": True}, "distributed layerwise offload"),
        ({"parallel_config": {"ulysses_degree": 2}}, "sequence parallelism"),
        ({"parallel_config": {"use_hsdp": True, "hsdp_shard_size": 2}}, "HSDP"),
    ],
)
def test_full_scope_is_refused_with_what_cannot_be_combined(conflict: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"full.*{named}"):
        make(OmniDiffusionConfig, diffusion_compile_granularity="full", **conflict)
    make(OmniDiffusionConfig, diffusion_compile_granularity="regional", **conflict)


def test_a_deploy_yaml_stage_has_the_key() -> None:
    assert getattr(_parse_stage_deploy({"stage_id": 0, NAME: False}), NAME) is False
    assert getattr(_parse_stage_deploy({"stage_id": 0, "engine_args": {NAME: False}}), NAME) is False
    unset = _parse_stage_deploy({"stage_id": 0})
    assert getattr(unset, NAME) is None
    assert unset.engine_extras == {}
    assert StageDeployConfig(stage_id=0) != _parse_stage_deploy({"stage_id": 0, NAME: False})
    assert getattr(unset, CONFIG) is None
    assert getattr(_parse_stage_deploy({"stage_id": 0, CONFIG: SAID}), CONFIG) == SAID
    assert getattr(_parse_stage_deploy({"stage_id": 0, "engine_args": {CONFIG: SAID}}), CONFIG) == SAID


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("diffusion_compile_config: {mode: reduce-overhead}", "diffusion_compile_config.mode is 'reduce-overhead'"),
        ("diffusion_compile_config: {modes: default}", "unknown key 'diffusion_compile_config.modes'; did you mean"),
        ("diffusion_compile_config: eager", "diffusion_compile_config is 'eager'"),
        ("diffusion_compile_vae: 'no'", "diffusion_compile_vae is 'no'"),
        ("diffusion_compile_granularity: half", "diffusion_compile_granularity is 'half'"),
        ("diffusion_compile_vea: false", "unknown setting 'diffusion_compile_vea'; did you mean"),
    ],
)
def test_a_wrong_value_in_a_deploy_yaml_is_named_with_file_and_stage(tmp_path: Path, line: str, message: str) -> None:
    deploy = tmp_path / "deploy.yaml"
    deploy.write_text(f"stages:\n- stage_id: 0\n- stage_id: 1\n  {line}\n")
    with pytest.raises(SettingError, match=f"{deploy}: stage 1: {message}"):
        load_deploy_config(deploy)


@pytest.mark.parametrize("name", [NAME, CONFIG])
def test_the_orchestrator_takes_the_flag_and_redistributes_it(name: str) -> None:
    assert getattr(OrchestratorArgs(), name) is None
    assert name in internal_blacklist_keys()


@pytest.mark.parametrize("name", [NAME, CONFIG])
def test_only_diffusion_stages_own_it(name: str) -> None:
    owners = omni_config._STAGE_ENGINE_FIELDS_BY_EXECUTION_TYPE
    assert {kind for kind, names in owners.items() if name in names} == {StageExecutionType.DIFFUSION}
