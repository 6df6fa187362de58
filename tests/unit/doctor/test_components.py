"""Declared component paths, read from a pipeline's code."""

from __future__ import annotations

from typing import Any, ClassVar

from vllm_omni_diffusion_compile.doctor import Finding
from vllm_omni_diffusion_compile.doctor.components import check_components


class Base:
    def __init__(self) -> None:
        self.vae: Any = None


class Pipeline(Base):
    _dit_modules: ClassVar[list[str]] = ["transformer", "language_model.model", "transfromer_2"]
    _vae_modules: ClassVar[list[str]] = ["vae"]

    def __init__(self) -> None:
        super().__init__()
        self.transformer, self.language_model = object(), object()


class ByName(Base):
    _dit_modules: ClassVar[list[str]] = ["transformer", "other"]

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        setattr(self, "transformer", None)  # noqa: B010 - a name that the code shows
        for name in names:
            setattr(self, name, None)


class DeclaresAnew(Base):
    _dit_modules: ClassVar[list[str]] = ["transformer"]

    def __init__(self) -> None:
        super().__init__()
        self._dit_modules = ["vae"]  # type: ignore[misc]


def paths(pipeline: type) -> dict[str, Finding]:
    return {
        finding.found.partition("'")[2].partition("'")[0]: finding
        for finding in check_components(pipeline)
        if "'" in finding.found
    }


def test_a_path_that_leads_nowhere_is_named_with_where_it_is_declared() -> None:
    found = paths(Pipeline)
    assert found["transfromer_2"].state == "limit"
    assert "nothing in Pipeline or its bases sets 'transfromer_2'" in found["transfromer_2"].found
    assert "_dit_modules" in found["transfromer_2"].remedy and __file__ in found["transfromer_2"].remedy


def test_what_the_class_or_a_base_sets_is_there() -> None:
    found = paths(Pipeline)
    assert (found["transformer"].state, found["vae"].state) == ("ok", "ok")


def test_what_only_a_loaded_model_knows_is_not_guessed() -> None:
    assert paths(Pipeline)["language_model.model"].state == "unknown"
    assert (paths(ByName)["transformer"].state, paths(ByName)["other"].state) == ("ok", "unknown")
    assert paths(DeclaresAnew)["transformer"].state == "unknown"
