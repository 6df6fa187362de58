"""Which revision of a checkpoint lies in a folder."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from pathlib import Path

# Of a large file: so many bytes of its begin, of its middle and of its end. Safetensors files begin with the names and
# shapes of what they hold.
_SAMPLE = 1 << 20
_COMMIT = re.compile(r"[0-9a-f]{40}")


def revision(folder: Path) -> str:
    """Name the revision of a checkpoint: its commit, if a hub's cache keeps it by that, else a hash of its files.

    Files of more than three mebibytes are sampled, so that a start need not read all weights: two checkpoints that
    differ only between the samples of a file of the same size have the same hash.
    """
    folder = folder.resolve()
    parts = folder.parts
    for place, (parent, name) in enumerate(itertools.pairwise(parts), 2):
        if parent == "snapshots" and _COMMIT.fullmatch(name):
            return " ".join([f"commit {name}", *parts[place:]])  # some models keep several checkpoints in one
    content = hashlib.sha256()
    files = (file for file in folder.rglob("*") if file.is_file())
    # What begins with a dot belongs to the tool that made the folder.
    for file in sorted(file for file in files if not any(part[0] == "." for part in file.relative_to(folder).parts)):
        if file.suffix == ".pyc":
            continue
        size = file.stat().st_size
        content.update(f"{file.relative_to(folder).as_posix()} {size}\n".encode())
        content.update(_sampled(file, size))
    return f"sha256 {content.hexdigest()[:32]}"


def pipeline_class(folder: Path) -> str:
    """Name the pipeline that a checkpoint of diffusers says it is for; empty if it says none."""
    try:
        return str(json.loads((folder / "model_index.json").read_bytes()).get("_class_name") or "")
    except (OSError, ValueError):
        return ""


def _sampled(file: Path, size: int) -> bytes:
    if size <= 3 * _SAMPLE:
        return file.read_bytes()
    with file.open("rb") as opened:
        parts = []
        for start in (0, (size - _SAMPLE) // 2, size - _SAMPLE):
            opened.seek(start)
            parts.append(opened.read(_SAMPLE))
    return b"".join(parts)
