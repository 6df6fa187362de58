"""Wheel and sdist, installed into an environment that has the host and nothing else."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import vllm_omni_diffusion_compile
from tests.docs.pages import commands

pytestmark = pytest.mark.contract
ROOT = Path(__file__).resolve().parents[2]
NAME = "vllm_omni_diffusion_compile"
VERSION = vllm_omni_diffusion_compile.__version__
UV = str(Path(sys.executable).with_name("uv"))


def run(*command: str, cwd: Path = ROOT, **environment: str) -> str:
    """Run a command that has to succeed; return what it printed."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VLLM_PLUGINS")}
    env |= {"PYTHONDONTWRITEBYTECODE": "1", "UV_OFFLINE": "1", "COLUMNS": "200"} | environment
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def build(out: Path, *what: str) -> None:
    """Run the command of `docs/releasing.md`, with this interpreter and another folder."""
    (command,) = (found for found in commands(ROOT / "docs" / "releasing.md") if found.words[:2] == ("uv", "build"))
    (interpreter,) = (word for word in command.words if word.startswith(".venvs/"))
    stands_for = {"uv": UV, interpreter: sys.executable, "dist": str(out)}
    run(*(stands_for.get(word, word) for word in command.words), *what)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the sdist, and the wheel that is built from it, as `uv build` makes both."""
    out = tmp_path_factory.mktemp("dist")
    build(out)
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return built / f"{NAME}-{VERSION}-py3-none-any.whl"


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = set(contents(wheel))
    info = f"{NAME}-{VERSION}.dist-info"
    assert {name.partition("/")[0] for name in names} == {NAME, info}
    assert {f"{NAME}/py.typed", f"{info}/licenses/LICENSE", f"{info}/entry_points.txt"} <= names
    tracked = run("git", "ls-files", NAME).split()
    assert {name for name in names if name.startswith(f"{NAME}/")} == set(tracked)


def test_the_sdist_builds_the_same_wheel(built: Path, wheel: Path, tmp_path: Path) -> None:
    build(tmp_path, "--wheel")  # of the checkout itself, where that of `built` is of the sdist
    assert contents(tmp_path / wheel.name) == contents(wheel)


def test_the_sdist_has_what_its_readers_and_its_tests_need(built: Path) -> None:
    with tarfile.open(built / f"{NAME}-{VERSION}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = run("git", "ls-files", NAME, "docs", "tests", "tools").split()
    assert {*needed, "README.md", "CHANGELOG.md", "LICENSE", "Makefile", "mkdocs.yml", "pyproject.toml"} <= names


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that has what this one has, but for this package: links to what is installed here."""
    folder = tmp_path_factory.mktemp("host") / "venv"
    run(UV, "venv", "--quiet", "--python", sys.executable, str(folder))
    (packages,) = folder.glob("lib/python3*/site-packages")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        # Its metadata, and the file by which an editable install adds the checkout to sys.path.
        if NAME in entry.name or entry.name == "__pycache__" or (packages / entry.name).exists():
            continue
        if entry.suffix == ".dist-info":
            shutil.copytree(entry, packages / entry.name)  # uv passes over links to them
        else:
            (packages / entry.name).symlink_to(entry)
    assert not [entry for entry in packages.iterdir() if NAME in entry.name]
    return folder


@pytest.fixture(scope="module")
def installed(host: Path, wheel: Path) -> Path:
    """The same environment with the wheel, whose dependencies it had; its folder of programs."""
    told = run(UV, "pip", "install", "--python", str(host), "--dry-run", str(wheel))
    assert re.findall(r"^ [+~-] (\S+)", told, re.MULTILINE) == [NAME.replace("_", "-")], told
    run(UV, "pip", "install", "--python", str(host), "--no-deps", str(wheel))
    return host / "bin"


def test_installing_changes_nothing_of_the_host(installed: Path) -> None:
    """That nothing else would be installed is checked by the fixture; here, that what it needs is there."""
    missing = run(
        str(installed / "python"), "-c",
        "from importlib.metadata import requires, version\n"
        "from packaging.requirements import Requirement\n"
        f"needs = [Requirement(text) for text in requires('{NAME}')]\n"
        "needs = [need for need in needs if need.marker is None or need.marker.evaluate({'extra': ''})]\n"
        "assert needs\n"
        "print([str(need) for need in needs if not need.specifier.contains(version(need.name), prereleases=True)])",
    )  # fmt: skip
    assert missing.strip() == "[]"


def test_the_program_is_there_and_says_its_version(installed: Path, tmp_path: Path) -> None:
    said = run(str(installed / "vllm-omni-compile"), "--version", cwd=tmp_path)
    assert said.strip() == f"vllm-omni-compile {VERSION}"


def test_the_server_has_our_flags(installed: Path, tmp_path: Path) -> None:
    """vLLM finds the plugin through the wheel's entry points, and the code is that of the wheel."""
    said = run(
        str(installed / "python"), "-c",
        "import sys; sys.argv = ['vllm', 'serve', '--omni', '--help=all']\n"
        f"import atexit, {NAME}\n"
        f"atexit.register(lambda: print('FROM', {NAME}.__file__))\n"
        "from vllm.entrypoints.cli.main import main\n"
        "main()",
        cwd=tmp_path,
    )  # fmt: skip
    assert "--no-diffusion-compile-vae" in said and "--diffusion-compile-config JSON" in said
    (place,) = re.findall(r"^FROM (.*)$", said, re.MULTILINE)
    assert Path(place).is_relative_to(installed.parent) and not Path(place).parent.is_symlink()


def test_a_type_checker_reads_our_types(installed: Path) -> None:
    (marker,) = installed.parent.glob(f"lib/python3*/site-packages/{NAME}/py.typed")
    assert marker.is_file()


def test_the_version_is_in_one_place() -> None:
    at = run("git", "grep", "-lF", f'"{VERSION}"', "--", "*.py", "*.toml", ":!tests").split()
    assert at == [f"{NAME}/__init__.py"]
