"""From the option `backend` to what torch.compile takes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_omni_diffusion_compile.compile.backend import resolve_backend
from vllm_omni_diffusion_compile.errors import SettingError

MODULE = """
calls = []
def compiler(graph, inputs):
    calls.append(len(inputs))
    return graph.forward
class Backend:
    def __call__(self, graph, inputs):
        return compiler(graph, inputs)
    @staticmethod
    def static(graph, inputs):
        return compiler(graph, inputs)
class Needy:
    def __init__(self, device):
        self.device = device
level = 3
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An importable package with backends in it, one that lacks a dependency and one that breaks on import."""
    folder = tmp_path / "vendor_compiler"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "backends.py").write_text(MODULE)
    (folder / "lacking.py").write_text("import no_such_dependency\n")
    (folder / "broken.py").write_text("raise OSError('libvendor.so: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "vendor_compiler"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("name", "backend"),
    [("auto", "inductor"), ("inductor", "inductor"), ("eager", "eager"), ("aot_eager", "aot_eager")],
)
def test_a_name_that_torch_knows_is_handed_on(name: str, backend: str) -> None:
    assert resolve_backend(name) == backend


@pytest.mark.parametrize(
    "path",
    [
        "vendor_compiler.backends:compiler",
        "vendor_compiler.backends.compiler",
        "vendor_compiler.backends:Backend",
        "vendor_compiler.backends.Backend",
        "vendor_compiler.backends:Backend.static",
        "vendor_compiler.backends.Backend.static",
    ],
)
def test_a_dotted_path_compiles_with_what_it_names(package: Path, path: str) -> None:
    backend = resolve_backend(path)
    assert not isinstance(backend, (str, type))
    compiled: Callable[[torch.Tensor], torch.Tensor] = torch.compile(lambda x: x + 1, backend=backend)
    assert compiled(torch.ones(2)).tolist() == [2, 2]
    assert sys.modules["vendor_compiler.backends"].calls
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("inductr", "knows no such name; did you mean 'inductor'"),
        ("xyz", "knows no such name; install the package that brings it"),
        ("openxla", "needs the package 'torch_xla', which is not installed"),
        (
            "no_such_package.module:compiler",
            "importing 'no_such_package.module' failed.*No module named 'no_such_package'",
        ),
        ("no_such_package.compiler", "importing 'no_such_package' failed.*install it"),
        ("vendor_compiler.missing:compiler", "importing 'vendor_compiler.missing' failed"),
        ("vendor_compiler.lacking.compiler", "importing 'vendor_compiler.lacking' failed.*'no_such_dependency'"),
        ("vendor_compiler.broken:compiler", "importing 'vendor_compiler.broken' failed .OSError: libvendor.so"),
        ("vendor_compiler.backends:compilr", "has no 'compilr' in it; did you mean 'compiler'"),
        ("vendor_compiler.backends.compilr", "has no 'compilr' in it; did you mean 'compiler'"),
        ("vendor_compiler.backends:level", "its type is int, expected a callable"),
        ("vendor_compiler.backends:Needy", "cannot be made without arguments .TypeError"),
    ],
)
def test_one_that_is_not_there_is_an_error_that_says_what_to_do(package: Path, name: str, message: str) -> None:
    with pytest.raises(SettingError, match=message) as refused:
        resolve_backend(name)
    text = str(refused.value)
    assert text.startswith(f"diffusion_compile_config.backend is {name!r}, but ")
    assert "or use 'auto'. Known: " in text and "cudagraphs" not in text
    assert "aot_eager" in text
    assert "TESTING_ONLY" not in text
