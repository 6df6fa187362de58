"""What the table over the model families takes for a fact."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tools.model_families.facts import Call, Compilations, Outcome, modules_of, outcome, repeated_blocks
from tools.model_families.family import Family
from tools.model_families.measure import Row
from tools.model_families.table import summary

LINE = "Model runner: {} configured for lazy regional torch.compile with dynamic=True; and more"


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        return out


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.embedders = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Bypassing(Model):
    """Calls what its blocks consist of, as π0 does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block.linear(x)  # type: ignore[operator]
        return x


def judged(model: Model, lines: list[str], *, compiling: bool = True) -> Outcome:
    pipeline = torch.nn.Module()
    pipeline.transformer = model
    watch = Compilations()
    with watch.watching():
        for block in model.blocks if compiling else ():
            block.forward = torch.compile(block.forward)
    with torch.no_grad():
        model(torch.ones(1, 2))
    return outcome(modules_of(pipeline, "transformer", model), watch, lines, Call(made=True))


def test_blocks_are_counted_by_structure_alone() -> None:
    assert list(repeated_blocks(dict(Model().named_modules()))) == ["blocks.0", "blocks.1"]


def test_blocks_in_a_part_that_is_no_module_are_found() -> None:
    class Pipeline(torch.nn.Module):
        policy: Any

    pipeline, model = Pipeline(), Model()
    pipeline.policy = type("Policy", (), {})()
    pipeline.policy.model = model
    assert "policy.model.blocks.1" in modules_of(pipeline, "policy.model", model)


def test_a_line_about_blocks_that_run_compiled_is_true() -> None:
    found = judged(Model(), [LINE.format("transformer")])
    assert (found.blocks, found.idle, found.log, found.silent) == (2, 0, "true", False)


def test_a_line_about_blocks_that_are_never_called_is_conditional() -> None:
    found = judged(Bypassing(), [LINE.format("transformer")])
    assert (found.idle, found.log) == (2, "conditional")


def test_blocks_that_are_set_up_and_never_called_do_not_count_as_compiled() -> None:
    found = judged(Bypassing(), [LINE.format("transformer")])
    assert (found.blocks, found.share, found.silent) == (0, 0.0, False)


@pytest.mark.parametrize("words", ["", ", compiled when the model calls them"], ids=["stock", "ours"])
def test_what_a_line_says_besides_does_not_make_it_truer(words: str) -> None:
    line = LINE.format("transformer") + words
    assert judged(Model(), [line]).log == "true"
    assert judged(Bypassing(), [line]).log == "conditional"
    assert judged(Bypassing(), [line], compiling=False).log == "false"


def test_the_sentences_count_conditional_lines_and_blocks_that_are_never_called_by_themselves() -> None:
    family = Family(name="bypassing", pipeline="", build=lambda _: None, inputs=lambda *_: {})
    idle = judged(Bypassing(), [LINE.format("transformer")])
    found = judged(Model(), [LINE.format("transformer")])
    stock, ours = summary([Row(family=family, blocks={"Block": 2}, components=(), stock=found, ours=idle)])
    assert (
        stock
        == "Stock: blocks are compiled in 1 of 1 families that have any; 0 false log line(s), 0 left out in silence."
    )
    assert ours == (
        "Ours: blocks are compiled in 0 of 1 families that have any, and set up but never called in 1; "
        "0 false log line(s), 1 conditional, 0 left out in silence."
    )


def test_a_line_about_two_kinds_of_blocks_of_which_one_is_never_called_is_conditional() -> None:
    class Half(Model):
        def __init__(self) -> None:
            super().__init__()
            self.blocks.extend([Other(), Other()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks[:2]:
                x = block(x)
            return x

    class Other(Block):
        pass

    found = judged(Half(), [LINE.format("transformer")])
    assert (found.blocks, found.log) == (2, "conditional")


def test_a_line_about_another_component_is_false() -> None:
    assert judged(Model(), [LINE.format("transformer_2")]).log == "false"


def test_a_line_where_nothing_was_compiled_is_false() -> None:
    assert judged(Model(), [LINE.format("transformer")], compiling=False).log == "false"


def test_blocks_that_no_line_speaks_of_are_left_out_in_silence() -> None:
    assert judged(Model(), [], compiling=False).silent
    assert not judged(Model(), ["transformer is not compiled: it has been told not to"], compiling=False).silent
