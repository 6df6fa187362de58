"""The process of one arm: `python -m vllm_omni_diffusion_compile.commands.qualify_arm FOLDER`.

It reads `arm.json` of the folder and writes `result.json`: what was seen, or the error.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ARM, RESULT = "arm.json", "result.json"
# Of `arm.json`: hardware and environment of whoever asks, which a result may depend on.
MACHINE = "machine"
# How it is asked: a program with `Omni`, or the server.
API = "api"
# The SHA-256 of each picture of the request, by its file: an oracle of another picture is another oracle.
ASSETS = "assets"


def _still_there(assets: Mapping[str, str]) -> None:
    """See that pictures are the ones whose hashes will stand in the row.

    Raises:
        EvidenceError: One is another one.
    """
    from vllm_omni_diffusion_compile.errors import EvidenceError
    from vllm_omni_diffusion_compile.evidence import file_digest

    changed = [file for file, known in assets.items() if file_digest(Path(file)) != known]
    if changed:
        raise EvidenceError(f"request.images: {', '.join(changed)} has changed since the run began")


def main(folder: Path) -> None:
    """Run the arm that a folder describes."""
    from vllm_omni_diffusion_compile.plugin import register

    register()
    from vllm_omni_diffusion_compile.upstream.arm import Arm, run_arm
    from vllm_omni_diffusion_compile.upstream.served import run_served

    result: dict[str, Any]
    try:
        described = json.loads((folder / ARM).read_text(encoding="utf-8"))
        described.pop(MACHINE, None)
        assets = described.pop(ASSETS, {})
        _still_there(assets)
        run = run_served if described.pop(API) == "http" else run_arm
        result = run(Arm(**described), folder)
        _still_there(assets)
    except Exception as error:  # noqa: BLE001 - reported as the result
        traceback.print_exc()
        result = {"error": {"type": type(error).__name__, "message": str(error)}}
    part = folder / f"{RESULT}.part"
    part.write_text(json.dumps(result), encoding="utf-8")
    part.replace(folder / RESULT)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the engine's threads outlive `main`


if __name__ == "__main__":
    main(Path(sys.argv[1]))
