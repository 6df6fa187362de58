"""Declared combinations."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.evidence.rows import validated
from tools.tiny_checkpoints import klein, minimax_h3, wan
from tools.tiny_checkpoints.checkpoint import REPOSITORY, folder
from vllm_omni_diffusion_compile.errors import EvidenceError
from vllm_omni_diffusion_compile.evidence import make_row
from vllm_omni_diffusion_compile.evidence.suite import again, read_suite

SUITE = """
models:
  klein:
    checkpoint: klein
    task: text-to-image
    settings: {dtype: float32, diffusion_compile_config: {mode: default}}
    request: {prompt: a cat, seed: 1, width: 128}
combinations:
  - {id: a, model: klein, api: http}
  - id: b
    model: klein
    settings: {diffusion_compile_config: {rainfusion_executor: flex}, ulysses_degree: 2, cache_backend: tea_cache}
    request: {width: 256}
    devices: 2
"""


def test_a_combination_is_laid_over_its_model(tmp_path: Path) -> None:
    file = tmp_path / "suite.yaml"
    file.write_text(SUITE)
    suite = read_suite(str(file))
    declared = suite.declared(suite.combinations[1])
    assert declared.request == {"prompt": "a cat", "seed": 1, "width": 256}
    assert declared.settings["diffusion_compile_config"] == {"mode": "default", "rainfusion_executor": "flex"}
    assert suite.declared(suite.combinations[0]).settings["diffusion_compile_config"] == {"mode": "default"}


def test_the_oracle_keeps_what_is_meant_to_change_the_result(tmp_path: Path) -> None:
    file = tmp_path / "suite.yaml"
    file.write_text(SUITE)
    suite = read_suite(str(file))
    assert suite.declared(suite.combinations[1]).oracle == {
        "dtype": "float32",
        "cache_backend": "tea_cache",
        "diffusion_compile_config": {"rainfusion_executor": "reference"},
        "enforce_eager": True,
    }


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("id: a, model: klein", "id: a, model: other", "a: model is 'other', expected one of: klein"),
        ("id: b", "id: a", "a stands twice"),
        ("seed: 1, ", "", "a: request.seed is None"),
        ("seed: 1, ", "seed: 1, images: cat.png, ", "a: request.images is 'cat.png', expected a list of files"),
        ("seed: 1, ", "seed: 1, images: [/home/me/cat.png], ", "expected a list of files, named by their paths below"),
        ("seed: 1, ", "seed: 1, images: [cat.png], ", "a: api (--api) is 'http' and request.images is ['cat.png']"),
        ("devices: 2", "device: 2", "combinations.1.device: no row has this field"),
        ("id: b", "id: B b", "combinations.1.id"),
        ("models:", "models: {", "is no YAML"),
        ("api: http", "api: grpc", "combinations.0.api"),
        ("task: text-to-image", "task: text-to-video", "a: api (--api) is 'http' and task is 'text-to-video'"),
    ],
)
def test_what_is_wrong_with_a_suite_is_named(tmp_path: Path, before: str, after: str, said: str) -> None:
    file = tmp_path / "suite.yaml"
    assert before in SUITE
    file.write_text(SUITE.replace(before, after))
    with pytest.raises(EvidenceError) as error:
        read_suite(str(file))
    assert str(file) in str(error.value) and said in str(error.value)


def test_a_suite_that_is_not_there_is_named() -> None:
    with pytest.raises(EvidenceError, match="expected a YAML file, or one of: tiny"):
        read_suite("other")


def test_the_tiny_suite_names_the_checkpoints_that_the_tools_write() -> None:
    models = read_suite("tiny").models
    written = {
        "klein": folder("klein", klein.VERSION),
        "klein-edit": folder("klein", klein.VERSION),
        "h3": folder("minimax_h3", minimax_h3.VERSION) / "FL2VA",
        "wan": folder("wan", wan.VERSION),
    }
    assert {name: model.checkpoint for name, model in models.items()} == {
        name: path.relative_to(REPOSITORY).as_posix() for name, path in written.items()
    }


def test_a_row_says_how_it_is_run_again() -> None:
    row = validated()
    assert row.provenance is not None
    declared = again(row)
    assert (declared.settings, declared.request) == (row.provenance.settings, row.provenance.request)
    assert declared.task == "text-to-image" and not declared.refused


def test_a_row_without_provenance_cannot_be_run_again() -> None:
    row = make_row("two", validated().key, "not tested", reason="there is one device")
    with pytest.raises(EvidenceError, match="declare it in a suite"):
        again(row)
