from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tools.demo.trace import Counts, TraceError, compilations_in, count

# Everything that torch counts, or does not: two modules that share a function and recompile for a second shape, a graph
# break, a frame without a tensor operator, and a backend that fails. `eager` compiles nothing and still counts.
RECORDED = """
import json, sys, time
import torch
from torch._dynamo.utils import counters
sys.path.insert(0, {sources!r})
from models.autoencoders.autoencoder_tiny import wrapper
from tiny_transformer import Block, Head

options = {{"backend": "eager", "dynamic": False}}
blocks = [Block(), Block()]
for block in blocks:
    block.forward = torch.compile(block.forward, **options)
head = torch.compile(Head().forward, **options)
decode = torch.compile(wrapper, backend="eager", dynamic=None)

@torch.compile(backend="eager")
def no_operator(x):
    return 1

def refuse(graph, inputs):
    raise RuntimeError("no")

@torch.compile(backend=refuse)
def fails(x):
    return x - 1

with torch.no_grad():
    for block in blocks:
        block(torch.ones(2, 8))
    head(torch.ones(2, 8))
    decode(torch.ones(4))
    no_operator(torch.ones(2))
    try:
        fails(torch.ones(2))
    except Exception:
        pass
    before = counters["stats"]["unique_graphs"]
    time.sleep(0.05)
    ready = time.time()
    time.sleep(0.05)
    blocks[0](torch.ones(3, 8))
    decode(torch.ones(5))
    decode(torch.ones(6))
print(json.dumps([before, counters["stats"]["unique_graphs"] - before, ready]))
"""

TRANSFORMER = """
import torch

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x).relu()

class Head(torch.nn.Module):
    def forward(self, x):
        x = x * 2
        torch._dynamo.graph_break()
        return x + 1
"""

# The frame that is compiled is that of a decorator in another file, as in diffusers.
DECORATOR = "def decorate(function):\n    def wrapper(x):\n        return function(x)\n    return wrapper\n"
AUTOENCODER = "from decorator import decorate\n\n@decorate\ndef wrapper(x):\n    return x * 3 - 1\n"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, int, float]:
    """A trace, what torch's own counters said before and after a moment, and that moment."""
    folder = tmp_path_factory.mktemp("recorded")
    traces, sources = folder / "traces", folder / "sources"
    for file, text in {
        "tiny_transformer.py": TRANSFORMER,
        "decorator.py": DECORATOR,
        "models/autoencoders/autoencoder_tiny.py": AUTOENCODER,
    }.items():
        (sources / file).parent.mkdir(parents=True, exist_ok=True)
        (sources / file).write_text(text)
    traces.mkdir()
    ran = subprocess.run(
        [sys.executable, "-c", RECORDED.format(sources=str(sources))],
        env=os.environ | {"TORCH_TRACE": str(traces), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")},
        capture_output=True,
        text=True,
        check=True,
    )
    before, after, ready = json.loads(ran.stdout.splitlines()[-1])
    return traces, before, after, ready


def test_counts_what_torch_counts(recorded: tuple[Path, int, int, float]) -> None:
    traces, before, after, ready = recorded
    counts = count(traces, ready)
    assert (counts.before, counts.after) == (before, after)
    assert before >= 4 and after == 2


def test_functions_are_told_apart_by_where_their_graph_comes_from(recorded: tuple[Path, int, int, float]) -> None:
    traces, _, _, ready = recorded
    counts = count(traces, ready)
    assert (counts.transformer_functions, counts.vae_functions) == (2, 1)
    assert [c.function[2] for c in compilations_in(traces) if c.vae] == ["wrapper", "wrapper"]


def test_a_server_that_compiled_nothing(tmp_path: Path) -> None:
    assert count(tmp_path, time.time()) == Counts(before=0, after=0, transformer_functions=0, vae_functions=0)


def written(folder: Path, record: dict[str, Any], name: str = "0") -> None:
    line = f"V1129 19:31:33.475000 9953 torch/_dynamo/utils.py:2009] {json.dumps(record)}\n"
    (folder / f"dedicated_log_torch_trace_{name}.log").write_text(line)


def metrics(**changed: Any) -> dict[str, Any]:
    fields = {"co_name": "forward", "co_filename": "a_transformer.py", "co_firstlineno": 1, "end_time_us": 5_000_000}
    record: dict[str, Any] = {"frame_id": 0, "frame_compile_id": 0}
    return record | {"compilation_metrics": fields | {"has_guarded_code": True, "graph_op_count": 3} | changed}


def test_workers_are_added_up_and_their_common_function_counts_once(tmp_path: Path) -> None:
    written(tmp_path, metrics(), "rank_0_a")
    written(tmp_path, metrics(end_time_us=7_000_000), "rank_1_b")
    assert count(tmp_path, 6.0) == Counts(before=1, after=1, transformer_functions=1, vae_functions=0)


def test_a_compilation_that_was_under_way_when_the_server_was_ready_comes_after(tmp_path: Path) -> None:
    written(tmp_path, metrics(start_time=4.0))
    assert count(tmp_path, 4.5).after == 1


def test_a_field_that_torch_renamed_is_an_error_not_a_zero(tmp_path: Path) -> None:
    record = metrics()
    del record["compilation_metrics"]["graph_op_count"]
    written(tmp_path, record)
    with pytest.raises(TraceError, match=r"dedicated_log_torch_trace_0\.log, line 1: .*graph_op_count"):
        count(tmp_path, 0.0)
