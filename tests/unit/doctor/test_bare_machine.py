"""`vllm-omni-compile doctor` where there is no vLLM: an environment with everything of this one but the host."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

_HOST = re.compile(r"vllm(_omni|_cpu)?([-.].*)?")
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def without_host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a link to every package of this environment but vLLM and vLLM-Omni."""
    folder = tmp_path_factory.mktemp("packages")
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not _HOST.fullmatch(entry.name) and entry.suffix != ".pth":
            (folder / entry.name).symlink_to(entry)
    return folder


def doctor(packages: Path, tmp_path: Path, *arguments: str, **environment: str) -> tuple[int, dict[str, Any]]:
    """Run it in a process that sees these packages alone; return its exit status and its document."""
    done = subprocess.run(
        # -S: what this environment has installed is not added to the path.
        [sys.executable, "-S", "-m", "vllm_omni_diffusion_compile", "doctor", "--json", *arguments],
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": f"{ROOT}:{packages}", **environment},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def found(document: dict[str, Any], section: str) -> dict[str, dict[str, str]]:
    """The findings of a section, by their name."""
    (findings,) = [each["findings"] for each in document["sections"] if each["title"] == section]
    return {each["name"]: each for each in findings}


def test_no_host_is_named_and_the_rest_is_checked(without_host: Path, tmp_path: Path) -> None:
    status, document = doctor(without_host, tmp_path, "--", "vllm", "serve", "MODEL", "--omni")
    assert (status, document["exit_status"], document["verdict"]) == (2, 2, "it will not work")
    versions = found(document, "versions")
    for package in ("vllm", "vllm-omni"):
        assert versions[package]["state"] == "broken"
        assert "not installed" in versions[package]["found"]
    assert "install vLLM-Omni >=0.28.0,<0.31" in versions["vllm-omni"]["remedy"]
    assert found(document, "settings")["command line"]["state"] == "unknown"
    assert found(document, "compiler")["C++ compiler"]["state"] == "ok"
    assert found(document, "compile cache")["cache directory"]["found"].startswith(str(tmp_path))


@pytest.mark.parametrize(
    ("compiler", "said"),
    [
        ("/nonexistent/c++", "inductor finds none (CXX is '/nonexistent/c++')"),
        ("{tmp_path}/c++", "does not compile a line: fatal error: omp.h: No such file"),
    ],
)
def test_a_compiler_that_is_not_there_or_does_not_compile_is_named(
    without_host: Path, tmp_path: Path, compiler: str, said: str
) -> None:
    script = tmp_path / "c++"
    script.write_text(
        '#!/bin/sh\ncase "$1" in --version) exit 0;; esac\necho "fatal error: omp.h: No such file" >&2\nexit 1\n'
    )
    script.chmod(0o755)
    _, document = doctor(without_host, tmp_path, CXX=compiler.format(tmp_path=tmp_path))
    finding = found(document, "compiler")["C++ compiler"]
    assert finding["state"] == "limit"
    assert said in finding["found"]
    assert "install g++ or clang++" in finding["remedy"] and "runs eagerly" in finding["remedy"]


def test_torch_that_is_told_to_compile_nothing_is_named(without_host: Path, tmp_path: Path) -> None:
    _, document = doctor(without_host, tmp_path, TORCH_COMPILE_DISABLE="1")
    finding = found(document, "compiler")["torch.compile"]
    assert finding["state"] == "limit"
    assert "TORCH_COMPILE_DISABLE is set" in finding["found"] and "unset" in finding["remedy"]
