"""Files that settings name: the report on the start, and the evidence that a start demands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from vllm_omni_diffusion_compile.doctor.cache import try_to_write
from vllm_omni_diffusion_compile.doctor.finding import Finding
from vllm_omni_diffusion_compile.errors import EvidenceError
from vllm_omni_diffusion_compile.evidence.files import read_rows

_REPORT = "warmup.report_path"
_EVIDENCE = "require_evidence"


def check_files(*, report_path: str | None = None, require_evidence: str | None = None) -> Iterator[Finding]:
    """Check that a server could write the one and read the other.

    Args:
        report_path: The key `warmup.report_path`.
        require_evidence: The key `require_evidence`.
    """
    if report_path is not None:
        yield _report(Path(report_path).expanduser().absolute())
    if require_evidence is not None:
        yield _evidence(Path(require_evidence).expanduser())


def _report(path: Path) -> Finding:
    try:
        try_to_write(path.parent)
    except OSError as error:
        return Finding.limit(
            _REPORT,
            f"{path} cannot be written: {error.strerror or error}",
            "choose a folder that the user who serves can write; GET /v1/diffusion_compile/report has the report all "
            "the same",
        )
    return Finding.ok(_REPORT, f"{path} can be written")


def _evidence(path: Path) -> Finding:
    try:
        rows = read_rows(path)
    except EvidenceError as error:
        return Finding.broken(_EVIDENCE, str(error), "name a file that qualify wrote, or leave it out")
    validated = sum(row.state == "validated" for row in rows)
    if not validated:
        return Finding.broken(
            _EVIDENCE,
            f"{path} has no validated row: no worker starts",
            f"vllm-omni-compile qualify ... --evidence {path} writes one; or leave it out",
        )
    return Finding.unknown(
        _EVIDENCE, f"{path} has {validated} validated row(s); whether one is for this start is for its worker to say"
    )
