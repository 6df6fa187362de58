"""Makes PyPI's torchvision and torchaudio importable beside a CPU build of torch; does nothing where they already are.

Both packages on PyPI are compiled against a CUDA build. Beside torch's CPU build torchvision stops because its
operators were never defined, and torchaudio because its shared libraries do not load. The host imports both. PyTorch's
own CPU builds need none of this.
"""

from __future__ import annotations

import importlib.util
import py_compile
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

HOOK = "torchvision_operators"


def import_error(package: str) -> str | None:
    """Import `package` in a fresh interpreter; returns None, or what it printed when it failed."""
    result = subprocess.run([sys.executable, "-c", f"import {package}"], capture_output=True, text=True, check=False)
    return None if result.returncode == 0 else result.stderr


def replace_file(target: Path, text: str) -> None:
    """Write `target` as a new file: an installed file may share its inode with the installer's cache."""
    target.unlink(missing_ok=True)
    target.write_text(text)


def mend_torchvision(site_packages: Path) -> None:
    """Install the import hook that defines torchvision's operators, for every interpreter of the environment."""
    hook = Path(__file__).with_name(f"{HOOK}.py")
    replace_file(site_packages / f"{HOOK}.py", hook.read_text())
    # Compiled here, since an interpreter that is told not to write bytecode would compile it at every start.
    py_compile.compile(str(site_packages / f"{HOOK}.py"), doraise=True)
    replace_file(site_packages / f"{HOOK}.pth", f"import {HOOK}; {HOOK}.install()\n")


def mend_torchaudio() -> None:
    """Remove torchaudio's shared libraries; without them it falls back to its Python code."""
    spec = importlib.util.find_spec("torchaudio")
    if spec is None or spec.origin is None:
        raise SystemExit("mend.py: torchaudio is not installed; expected it from lock.txt, run create.sh again")
    package = Path(spec.origin).parent
    shutil.rmtree(package / "lib", ignore_errors=True)
    for library in package.rglob("*.so"):
        library.unlink()


def main() -> None:
    """Detect what is unusable, mends that alone, and fails when mending was not enough."""
    site_packages = Path(sysconfig.get_path("purelib"))
    if import_error("torchvision") is not None:
        mend_torchvision(site_packages)
        print("        torchvision: defined its operators at import")
    if import_error("torchaudio") is not None:
        mend_torchaudio()
        print("        torchaudio: removed its shared libraries")
    for package in ("torchvision", "torchaudio"):
        error = import_error(package)
        if error is not None:
            raise SystemExit(f"mend.py: {package} does not import beside this torch, even mended:\n{error}")


if __name__ == "__main__":
    main()
