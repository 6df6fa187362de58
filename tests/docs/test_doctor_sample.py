"""What docs/doctor.md shows is what the doctor prints."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

from tests.docs.pages import DOCS, blocks, commands
from tests.host import generic


def test_the_sample_is_what_it_prints(tmp_path: Path) -> None:
    shown = [block for block in blocks(DOCS / "doctor.md") if block.language == "text"]
    deploy = next(block for block in blocks(DOCS / "doctor.md") if block.language == "yaml")
    command = next(command for command in commands(DOCS / "doctor.md") if "CXX" in command.environment)
    generic(tmp_path / "klein")
    (tmp_path / "deploy.yaml").write_text(deploy.text)
    # In a process of its own, which loads the host as a server does.
    done = subprocess.run(
        [sys.executable, "-m", "vllm_omni_diffusion_compile", *command.words[1:]],
        env={name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "TORCH", "COLUMNS"))}
        | command.environment
        | {"COLUMNS": "250"},  # no path of this machine is broken into two lines
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    # Where this environment lies, and its Python's last number, are all that may differ.
    printed = done.stdout.replace(sys.prefix, "/opt/venv").replace(f"{platform.python_version()} in", "3.11.7 in")
    assert _words(printed) == _words(shown[0].text)


def _words(text: str) -> list[str]:
    return [word for word in text.split() if not word.startswith("─")]
