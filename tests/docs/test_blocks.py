"""What the pages show beside commands: settings that the release reads, log lines that are in the source, programs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.pages import DOCS, PAGES, Block, blocks
from tests.docs.templates import templates
from tests.host import generic, resolve
from vllm_omni_diffusion_compile.settings import DiffusionCompileSettings

ALL = [block for page in PAGES for block in blocks(page)]
# Each has a test: shell ones in test_commands, `text` for what is none of them (tables, trees, shapes of JSON).
LANGUAGES = {"bash", "console", "json", "log", "promql", "python", "text", "toml", "yaml"}


def of(language: str) -> list[Block]:
    return [block for block in ALL if block.language == language]


@pytest.mark.parametrize("block", ALL, ids=str)
def test_a_block_says_what_it_is(block: Block) -> None:
    assert block.language in LANGUAGES
    if block.language == "json":
        json.loads(block.text)


@pytest.mark.parametrize("block", of("log"), ids=str)
def test_a_log_line_is_one_that_the_source_can_print(block: Block) -> None:
    for message in _messages(block.text):
        plain = " ".join(message.split())
        assert any(template.pattern.fullmatch(plain) for template in templates()), message


def _messages(text: str) -> Iterator[str]:
    """Yield the messages of a log: a line that is indented, or follows one without a full stop, goes on with it."""
    lines = [line for line in text.splitlines() if line.strip()]
    message = ""
    for line in lines:
        if message and not line.startswith(" ") and message.endswith("."):
            yield message
            message = ""
        message = f"{message}\n{line}".strip()
    yield message


@pytest.mark.parametrize("block", of("yaml"), ids=str)
def test_yaml_is_a_deploy_file_that_the_release_reads_or_rules_for_our_metrics(
    block: Block, tmp_path: Path, release: tuple[int, int]
) -> None:
    content = yaml.safe_load(block.text)
    if isinstance(content, list) and all("alert" in rule for rule in content):
        assert all(_families(rule["expr"]) for rule in content)
        return
    # The whole file, or what stands in one of its stages.
    stages = content.get("stages") or [{"stage_id": 0, **content}]
    deploy = tmp_path / "deploy.yaml"
    deploy.write_text(yaml.safe_dump({"stages": stages}))
    from vllm_omni.config.stage_config import load_deploy_config

    for stage in load_deploy_config(str(deploy)).stages:
        DiffusionCompileSettings.of(stage)
    assert resolve(generic(tmp_path / "model"), release, deploy)


@pytest.mark.parametrize("block", of("promql"), ids=str)
def test_a_query_asks_for_families_that_there_are(block: Block) -> None:
    assert _families(block.text)


def _families(query: str) -> set[str]:
    """Return our families that a query names; each has to be registered."""
    from vllm_omni_diffusion_compile.upstream import metrics

    source = Path(metrics.__file__).read_text(encoding="utf-8")
    named = set(re.findall(r"vllm_omni:(diffusion_compile_\w+?)(?:_total)?\b", query))
    assert all(f"{name}" in source for name in named), named
    return named


@pytest.mark.parametrize("block", of("python"), ids=str)
def test_a_program_runs_up_to_the_engine(
    block: Block, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, release: tuple[int, int]
) -> None:
    from vllm_omni.entrypoints import omni

    made: list[dict[str, Any]] = []

    class Resolves:
        def __init__(self, model: str, **given: Any) -> None:
            assert model == "MODEL"
            (stage,) = resolve(generic(tmp_path / "model"), release, **given)
            made.append(given)
            assert all(stage[name] == value for name, value in given.items())

    monkeypatch.setattr(omni, "Omni", Resolves)
    exec(compile(block.text, str(block), "exec"), {})
    assert made, "expected an engine to be made"


def test_every_example_of_an_option_is_one(tmp_path: Path, release: tuple[int, int]) -> None:
    """`docs/options.md` is rendered from the settings; its flags are read in test_commands, the other surfaces here."""
    model = generic(tmp_path / "model")
    page = (DOCS / "options.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (Key of a stage[^|]*|Keyword argument) \| `(.*)` \|$", page, re.MULTILINE)
    assert len(rows) >= 3 * len(DiffusionCompileSettings.model_fields)
    for surface, example in rows:
        if surface == "Keyword argument":
            given = eval(example, {"Omni": lambda model, **given: given})
        elif "stage-overrides" in surface:
            given = json.loads(example.strip("'"))["0"]
        else:
            given = yaml.safe_load(example)
        (stage,) = resolve(model, release, **given)
        for name, value in given.items():
            assert stage[name] == value, example
