"""`diffusion_compile_vae` on every configuration class of the installed vLLM-Omni."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pydantic
import pytest
from vllm_omni.config import omni_config
from vllm_omni.config.omni_config import _DiffusionConfigProjection
from vllm_omni.config.stage_config import StageDeployConfig, StageExecutionType, _parse_stage_deploy
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.engine.arg_utils import OrchestratorArgs, internal_blacklist_keys

pytestmark = pytest.mark.contract
NAME = "diffusion_compile_vae"


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
    "name", ["diffusion_compile_vea", "diffusion_compile_vaes", "diffusion_compile_granlarity", "difusion_compile_vae"]
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


def test_the_orchestrator_takes_the_flag_and_redistributes_it() -> None:
    assert getattr(OrchestratorArgs(), NAME) is None
    assert NAME in internal_blacklist_keys()


def test_only_diffusion_stages_own_it() -> None:
    owners = omni_config._STAGE_ENGINE_FIELDS_BY_EXECUTION_TYPE
    assert {kind for kind, names in owners.items() if NAME in names} == {StageExecutionType.DIFFUSION}
