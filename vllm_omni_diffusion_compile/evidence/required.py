"""Whether there is evidence for what is about to start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_omni_diffusion_compile.errors import EvidenceError
from vllm_omni_diffusion_compile.evidence.files import read_rows
from vllm_omni_diffusion_compile.evidence.row import Row

# Fields of a row's key that a start knows; what else there is, a request decides.
AT_START = (
    "model",
    "execution_mode",
    "capacity",
    "attention_backend",
    "cache_policy",
    "quantization",
    "offload",
    "topology",
    "hardware",
    "dtype",
    "compiler",
    "compile_scope",
    "dynamic",
    "vae_policy",
    "bucket",
)
# And of its provenance: another release is another combination.
SOFTWARE = ("checkpoint_revision", "vllm_omni", "version", "torch")


# Keys of `diffusion_compile_config` that change what is computed and have no field in a row's key, with their defaults:
# compared with the settings that the row was made with.
OF_SETTINGS: Mapping[str, Any] = {"rainfusion_executor": "auto", "infer_regions": True, "recompile_limit": None}


def require(  # noqa: PLR0913, PLR0917 - each is one part of what is about to start
    path: Path,
    known: Mapping[str, Any],
    software: Mapping[str, str],
    buckets: Sequence[int | None],
    command: str,
    config: Mapping[str, Any] = OF_SETTINGS,
) -> list[Row]:
    """Find a validated row for each bucket of what is about to start.

    Args:
        path: File or folder of rows.
        known: The fields `AT_START`, but for `bucket`.
        software: The fields `SOFTWARE`.
        buckets: Rows that packed sequences are padded to; None alone where there are no buckets.
        command: What would qualify it.
        config: The keys `OF_SETTINGS`.

    Returns:
        The rows, one a bucket.

    Raises:
        EvidenceError: There is none for one of them, or no file of rows.
    """
    rows = [row for row in read_rows(path) if row.state == "validated" and row.key.api_mode != "component"]
    found = []
    for bucket in buckets:
        here = {**known, "bucket": bucket, **software, **config}
        nearest = min(rows, key=lambda row: len(_differences(row, here)), default=None)
        if nearest is None:
            raise EvidenceError(f"{path} has no validated row of a model that was served; qualify it here: {command}")
        differences = _differences(nearest, here)
        if differences:
            raise EvidenceError(
                f"{path} has no validated row for this combination. The nearest one, {nearest.id!r}, differs in "
                f"{'; '.join(differences)}. Qualify it on this machine: {command}"
            )
        found.append(nearest)
    return found


def _differences(row: Row, here: Mapping[str, Any]) -> list[str]:
    there = {name: getattr(row.key, name) for name in AT_START}
    there |= {name: getattr(row.provenance, name) for name in SOFTWARE}
    config = row.provenance.settings.get("diffusion_compile_config") if row.provenance else None
    made_with = config if isinstance(config, Mapping) else {}
    there |= {name: made_with.get(name, default) for name, default in OF_SETTINGS.items()}
    return [f"{name} ({here[name]!r} here, {there[name]!r} in the row)" for name in there if here[name] != there[name]]
