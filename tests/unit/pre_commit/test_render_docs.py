from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel, Field

from tests.unit.pre_commit.rows import LINK, field_row, row
from tools.pre_commit import render_docs
from tools.pre_commit.render_docs import main, render_grafts, render_options


class Keys(BaseModel):
    level: Literal["low", "high"] = Field(default="low", description="How much | of it")
    limit: int | None = Field(default=None, description="At most.", json_schema_extra={"values": "1 or more"})


class Settings(BaseModel):
    scope: Literal["regional", "full"] = Field(
        default="regional",
        description="What is compiled",
        json_schema_extra={"flag": "--scope regional|full", "from": "vLLM-Omni"},
    )
    dynamic: bool = Field(default=False, description="Any shape.", json_schema_extra={"flag": "--[no-]dynamic"})
    budget: float | None = Field(
        default=None, description="Seconds.", json_schema_extra={"flag": "--budget S", "example": 30}
    )
    sizes: list[str] = Field(default_factory=list, description="Sizes.", json_schema_extra={"example": ["1x1", "2x2"]})
    tuning: Keys = Field(
        default_factory=Keys,
        description="Tuning.",
        json_schema_extra={"flag": "--tuning JSON", "example": {"level": "high", "limit": 3}},
    )


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    texts = {"grafts.md": "# Grafts\n", "options.md": "# Options\n"}
    monkeypatch.setattr(render_docs, "pages", lambda: texts)
    return texts


def test_grafts_have_one_line_each_below_their_heading() -> None:
    rows = [row(releases="<0.30"), row(adds=True, upstream="none: a | b"), field_row()]
    text = render_grafts([("Features", rows), ("Empty", [])])
    assert "Empty" not in text
    data, why = "`vllm_omni.diffusion.data`", "The release drops a name in silence."
    field = "The setting has to reach the worker."
    table = text.partition("## Features")[2].strip().splitlines()
    assert table[2:] == [
        f"| `normalize` in {data} | `<0.30` | {why} | [vllm-omni#1]({LINK}) | the release refuses the name |",
        f"| adds `normalize` in {data} | all | {why} | none: a \\| b | the release refuses the name |",
        f"| adds field `Config.limit` in {data} | all | {field} | [vllm-omni#1]({LINK}) | the release has the field |",
    ]


def test_grafts_say_how_to_switch_them_off_and_that_the_file_is_generated() -> None:
    text = render_grafts([])
    assert text.startswith("<!-- Generated from ")
    assert "VLLM_PLUGINS=vllm_omni_register_models vllm serve" in text


def test_options_show_values_default_and_an_example_on_each_surface() -> None:
    scope, dynamic, budget, sizes, _ = render_options(Settings).split("\n## ")[1:]
    assert "What is compiled.\n" in scope
    assert "- Values: `regional` or `full`\n- Default: `regional`\n- Comes from: vLLM-Omni\n" in scope
    assert "`--scope regional\\|full` | `vllm serve MODEL --omni --scope full`" in scope
    assert "`scope: full`" in scope
    assert '`Omni(model="MODEL", scope="full")`' in scope
    assert "- Values: `true` or `false`\n- Default: `false`\n- Comes from: this package\n" in dynamic
    assert "--omni --dynamic`" in dynamic
    assert "`dynamic: true`" in dynamic
    assert "dynamic=True" in dynamic
    assert "- Values: a number or unset\n- Default: `null`\n" in budget
    assert "--omni --budget 30`" in budget
    assert "- Values: a list, each of a string\n- Default: `[]`\n" in sizes
    assert "| Flag" not in sizes
    assert "`sizes: [1x1, 2x2]`" in sizes


def test_a_mapping_shows_its_keys_and_each_way_to_give_it() -> None:
    text = render_options(Settings).partition("## `tuning`")[2]
    assert "- Values: a mapping of the keys below\n- Default: `{}`\n" in text
    assert "| `level` | `low` or `high` | `low` | How much \\| of it. |" in text
    assert "| `limit` | 1 or more | `null` | At most. |" in text
    for example in (
        """--omni --tuning '{"level": "high", "limit": 3}'`""",
        "--omni --tuning.level high --tuning.limit 3`",
        "`tuning: {level: high, limit: 3}`",
        """`'{"0": {"tuning": {"level": "high", "limit": 3}}}'`""",
        """`Omni(model="MODEL", tuning={"level": "high", "limit": 3})`""",
        "`--tuning.level high`.\nFlags that give the mapping more than once",
    ):
        assert example in text


def test_page_that_is_out_of_step_fails_with_a_diff(
    tmp_path: Path, rendered: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([], tmp_path) == 0
    (tmp_path / "options.md").write_text("# Stale\n")
    assert main(["--check"], tmp_path) == 1
    printed = capsys.readouterr().out
    assert "-# Stale\n+# Options\n" in printed
    assert "render_docs" in printed
    assert (tmp_path / "options.md").read_text() == "# Stale\n"


def test_missing_page_fails(tmp_path: Path, rendered: dict[str, str]) -> None:
    assert main(["--check"], tmp_path) == 1


def test_page_that_was_just_written_passes(tmp_path: Path, rendered: dict[str, str]) -> None:
    assert main([], tmp_path / "docs") == 0
    assert main(["--check"], tmp_path / "docs") == 0
