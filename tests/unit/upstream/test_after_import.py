"""Calling back after an import, and importing nothing for it."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from vllm_omni_diffusion_compile.upstream.after_import import AfterImport


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An importable package `watched` with modules `early` and `late`."""
    folder = tmp_path / "watched"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "early.py").write_text("VALUE = 1\n")
    (folder / "late.py").write_text("from watched import early\nVALUE = early.VALUE + 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "watched"]:
        del sys.modules[name]


@pytest.fixture
def seen() -> list[str]:
    return []


@pytest.fixture
def watch(package: None, seen: list[str]) -> Iterator[AfterImport]:
    def callback(module: ModuleType) -> None:
        seen.append(module.__name__)
        module.__dict__["VALUE"] += 10

    watch = AfterImport(["watched.early", "watched.late", "watched.gone"], callback)
    yield watch
    watch.remove()


def test_modules_are_called_back_once_in_the_order_of_their_import(watch: AfterImport, seen: list[str]) -> None:
    early = importlib.import_module("watched.early")
    watch.install()
    assert seen == ["watched.early"]
    late = importlib.import_module("watched.late")
    importlib.import_module("watched.late")
    assert seen == ["watched.early", "watched.late"]
    assert (early.VALUE, late.VALUE) == (11, 22)


def test_nobody_sees_the_module_before_the_callback(watch: AfterImport) -> None:
    watch.install()
    assert importlib.import_module("watched.late").VALUE == (1 + 10) + 1 + 10


def test_installing_imports_nothing(watch: AfterImport, seen: list[str]) -> None:
    watch.install()
    assert seen == []
    assert not any(name.startswith("watched") for name in sys.modules)


def test_a_watched_module_that_does_not_exist_fails_as_usual(watch: AfterImport) -> None:
    watch.install()
    with pytest.raises(ModuleNotFoundError, match=r"watched\.gone"):
        importlib.import_module("watched.gone")


def test_the_loader_still_answers_for_its_source(watch: AfterImport) -> None:
    watch.install()
    assert inspect.getsource(importlib.import_module("watched.early")) == "VALUE = 1\n"


def test_an_error_of_the_callback_fails_the_import_every_time(package: None) -> None:
    def refuse(module: ModuleType) -> None:
        raise RuntimeError(f"{module.__name__} is not what it should be")

    watch = AfterImport(["watched.early"], refuse)
    watch.install()
    try:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="not what it should be"):
                importlib.import_module("watched.early")
            assert "watched.early" not in sys.modules
    finally:
        watch.remove()
    assert importlib.import_module("watched.early").VALUE == 1
