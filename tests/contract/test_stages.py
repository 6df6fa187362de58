"""From command line, deploy YAML and keyword arguments to the engine arguments of a diffusion stage."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_omni.config.pipeline_registry import OMNI_PIPELINES
from vllm_omni.config.stage_config import PipelineConfig, StageExecutionType, StagePipelineConfig

from tests.host import CONFIG, THREE, resolve

pytestmark = pytest.mark.contract
NAME, *_ = THREE


@pytest.fixture
def registered_pipeline() -> Iterator[str]:
    """A two-stage pipeline of which the second one is diffusion."""
    name = "tiny_two_stage"
    OMNI_PIPELINES[name] = PipelineConfig(
        model_type=name,
        model_arch="Flux2KleinPipeline",
        stages=(
            StagePipelineConfig(
                stage_id=0,
                model_stage="thinker",
                execution_type=StageExecutionType.LLM_AR,
                input_sources=(),
                model_arch="Qwen3ForCausalLM",
            ),
            StagePipelineConfig(
                stage_id=1,
                model_stage="dit",
                execution_type=StageExecutionType.DIFFUSION,
                input_sources=(0,),
                final_output=True,
                final_output_type="image",
                model_arch="Flux2KleinPipeline",
            ),
        ),
    )
    yield name
    del OMNI_PIPELINES[name]


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_the_default_stage_compiles_the_vae(generic_model: str, release: tuple[int, int]) -> None:
    (stage,) = resolve(generic_model, release)
    assert stage[NAME] is True


def test_keywords_and_flags_reach_the_default_stage(generic_model: str, release: tuple[int, int]) -> None:
    (stage,) = resolve(
        generic_model,
        release,
        diffusion_compile_vae=False,
        diffusion_compile_dynamic=False,
        diffusion_compile_granularity="full",
    )
    assert [stage[name] for name in THREE] == [False, False, "full"]


def test_a_near_miss_is_refused_before_a_stage_is_built(generic_model: str, release: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="diffusion_compile_vea.*did you mean 'diffusion_compile_vae'"):
        resolve(generic_model, release, diffusion_compile_vea=False)


def test_stage_overrides_reach_a_generic_model(generic_model: str, release: tuple[int, int]) -> None:
    (stage,) = resolve(
        generic_model, release, overrides=json.dumps({"0": {NAME: False, "diffusion_compile_dynamic": False}})
    )
    assert stage[NAME] is False
    assert stage["diffusion_compile_dynamic"] is False


def test_the_yaml_of_a_generic_model_takes_effect(generic_model: str, release: tuple[int, int], tmp_path: Path) -> None:
    deploy = write(
        tmp_path / "deploy.yaml",
        f"stages:\n- stage_id: 0\n  {NAME}: false\n  diffusion_compile_dynamic: false\n"
        "  diffusion_compile_granularity: full\n  enforce_eager: true\n",
    )
    (stage,) = resolve(generic_model, release, deploy)
    assert [stage[name] for name in THREE] == [False, False, "full"]
    assert stage["enforce_eager"] is True


def test_the_command_line_wins_over_the_yaml_and_overrides_over_both(
    generic_model: str, release: tuple[int, int], tmp_path: Path
) -> None:
    deploy = write(
        tmp_path / "deploy.yaml", f"stages:\n- stage_id: 0\n  {NAME}: false\n  diffusion_compile_dynamic: false\n"
    )
    (stage,) = resolve(generic_model, release, deploy, diffusion_compile_vae=True)
    assert stage[NAME] is True
    assert stage["diffusion_compile_dynamic"] is False
    (stage,) = resolve(
        generic_model, release, deploy, {"0": {"diffusion_compile_dynamic": True}}, diffusion_compile_vae=True
    )
    assert stage["diffusion_compile_dynamic"] is True


def test_what_the_yaml_of_a_generic_model_cannot_set_is_named(
    generic_model: str,
    release: tuple[int, int],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deploy = write(
        tmp_path / "deploy.yaml",
        f"dtype: float32\nstages:\n- stage_id: 0\n  {NAME}: false\n  vae_use_tiling: true\n"
        f"- stage_id: 1\n  {NAME}: true\n",
    )
    resolve(generic_model, release, deploy)
    (warning,) = {record.getMessage() for record in caplog.records if "no deploy YAML" in record.getMessage()}
    assert f"have no effect: dtype, stages[0].vae_use_tiling, stages[1].{NAME}, stages[1].stage_id." in warning
    assert str(deploy) in warning


def test_a_setting_outside_of_a_stage_is_refused(generic_model: str, release: tuple[int, int], tmp_path: Path) -> None:
    deploy = write(tmp_path / "deploy.yaml", f"{NAME}: false\nstages:\n- stage_id: 0\n")
    with pytest.raises(ValueError, match=f"{NAME} stands outside of a stage"):
        resolve(generic_model, release, deploy)


def test_a_near_miss_in_the_yaml_of_a_generic_model_is_refused(
    generic_model: str, release: tuple[int, int], tmp_path: Path
) -> None:
    deploy = write(tmp_path / "deploy.yaml", "stages:\n- stage_id: 0\n  diffusion_compile_vea: false\n")
    with pytest.raises(ValueError, match="diffusion_compile_vea"):
        resolve(generic_model, release, deploy)


def test_a_yaml_is_forgotten_before_the_next_model(
    generic_model: str, release: tuple[int, int], tmp_path: Path
) -> None:
    deploy = write(tmp_path / "deploy.yaml", f"stages:\n- stage_id: 0\n  {NAME}: false\n")
    assert resolve(generic_model, release, deploy)[0][NAME] is False
    assert resolve(generic_model, release)[0][NAME] is True


def test_the_yaml_of_a_registered_pipeline_reaches_its_diffusion_stage_alone(
    generic_model: str, registered_pipeline: str, release: tuple[int, int], tmp_path: Path
) -> None:
    deploy = write(
        tmp_path / "deploy.yaml",
        f"pipeline: {registered_pipeline}\nasync_chunk: false\n"
        f"stages:\n- stage_id: 0\n- stage_id: 1\n  {NAME}: false\n",
    )
    thinker, dit = resolve(generic_model, release, deploy)
    assert dit[NAME] is False
    assert NAME not in thinker
    thinker, dit = resolve(generic_model, release, deploy, {"1": {NAME: True}})
    assert dit[NAME] is True
    assert NAME not in thinker


def test_a_flag_reaches_the_diffusion_stage_of_a_registered_pipeline(
    generic_model: str, registered_pipeline: str, release: tuple[int, int], tmp_path: Path
) -> None:
    deploy = write(
        tmp_path / "deploy.yaml",
        f"pipeline: {registered_pipeline}\nasync_chunk: false\nstages:\n- stage_id: 0\n- stage_id: 1\n",
    )
    thinker, dit = resolve(generic_model, release, deploy, diffusion_compile_vae=False, diffusion_compile_dynamic=False)
    assert dit[NAME] is False
    # 0.28.0 hands a global flag to every stage and drops it there when the stage's engine is built; as its neighbour.
    assert (NAME in thinker) == ("diffusion_compile_dynamic" in thinker)


TUNED = {"mode": "max-autotune-no-cudagraphs", "recompile_limit": 16}


@pytest.mark.parametrize("value", [None, {}, TUNED])
def test_the_mapping_reaches_the_default_stage(
    generic_model: str, release: tuple[int, int], value: dict[str, Any] | None
) -> None:
    (stage,) = resolve(generic_model, release, diffusion_compile_config=value)
    assert stage[CONFIG] == value


def yaml_of(model: str, pipeline: str | None, lines: str) -> str:
    """A deploy YAML with lines for the diffusion stage, of a generic model or of the registered pipeline."""
    if pipeline is None:
        return f"stages:\n- stage_id: 0\n  {lines}\n"
    return f"pipeline: {pipeline}\nasync_chunk: false\nstages:\n- stage_id: 0\n- stage_id: 1\n  {lines}\n"


@pytest.fixture(params=["generic", "registered"])
def pipeline(request: pytest.FixtureRequest) -> str | None:
    if request.param == "generic":
        return None
    return str(request.getfixturevalue("registered_pipeline"))


def test_flag_and_yaml_are_put_together_as_the_release_does_it_with_its_own_mappings(
    generic_model: str, pipeline: str | None, release: tuple[int, int], tmp_path: Path
) -> None:
    text = yaml_of(generic_model, pipeline, f"{CONFIG}: {json.dumps(TUNED)}")
    deploy = write(tmp_path / "deploy.yaml", text)
    assert resolve(generic_model, release, deploy)[-1][CONFIG] == TUNED
    flag = {"recompile_limit": 4, "on_failure": "raise"}
    stages = resolve(generic_model, release, deploy, diffusion_compile_config=flag)
    assert stages[-1][CONFIG] == (TUNED | flag if release >= (0, 30) else flag)
    number = str(len(stages) - 1)
    stages = resolve(generic_model, release, deploy, {number: {CONFIG: flag}})
    assert stages[-1][CONFIG] == (TUNED | flag if release >= (0, 30) else flag)
    other = {"infer_regions": False}
    stages = resolve(
        generic_model, release, None if pipeline is None else deploy, {number: {CONFIG: flag}}, **{CONFIG: other}
    )
    assert "infer_regions" not in stages[-1][CONFIG]


def test_a_mapping_of_the_release_is_put_together_alike(
    generic_model: str, registered_pipeline: str, release: tuple[int, int], tmp_path: Path
) -> None:
    text = yaml_of(generic_model, registered_pipeline, "custom_pipeline_args: {a: 1, b: 1}")
    deploy = write(tmp_path / "deploy.yaml", text)
    from vllm_omni.config.config_factory import StageConfigFactory

    config = StageConfigFactory.create_from_model(
        generic_model,
        trust_remote_code=None,
        cli_overrides={"stage_1_custom_pipeline_args": {"b": 2}},
        deploy_config_path=str(deploy),
    )
    (stage,) = [stage for stage in config.stage_configs if stage.stage_id == 1]
    assert stage.diffusion_config.custom_pipeline_args == ({"a": 1, "b": 2} if release >= (0, 30) else {"b": 2})


def test_the_mapping_stays_away_from_language_model_stages(
    generic_model: str, registered_pipeline: str, release: tuple[int, int], tmp_path: Path
) -> None:
    deploy = write(tmp_path / "deploy.yaml", yaml_of(generic_model, registered_pipeline, f"{CONFIG}: {{}}"))
    thinker, dit = resolve(generic_model, release, deploy, diffusion_compile_config=TUNED)
    assert dit[CONFIG] == TUNED
    # 0.28.0 hands a global flag to every stage and drops it there when the stage's engine is built.
    assert (CONFIG in thinker) == (release < (0, 30))


WRONG = {"mode": "max-autotune"}
REFUSED = f"{CONFIG}.mode is 'max-autotune', which uses CUDA graphs"


def test_a_wrong_mapping_is_refused_before_a_stage_starts(
    generic_model: str, pipeline: str | None, release: tuple[int, int], tmp_path: Path
) -> None:
    good = write(tmp_path / "good.yaml", yaml_of(generic_model, pipeline, "enforce_eager: false"))
    number = 0 if pipeline is None else 1
    with pytest.raises(ValueError, match=REFUSED):
        resolve(generic_model, release, good, diffusion_compile_config=WRONG)
    with pytest.raises(ValueError, match=REFUSED):
        resolve(generic_model, release, good, {str(number): {CONFIG: WRONG}})
    bad = write(tmp_path / "bad.yaml", yaml_of(generic_model, pipeline, f"{CONFIG}: {json.dumps(WRONG)}"))
    with pytest.raises(ValueError, match=f"{bad}: stage {number}: {REFUSED}"):
        resolve(generic_model, release, bad)
