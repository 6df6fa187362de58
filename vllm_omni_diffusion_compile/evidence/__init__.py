"""What was tried, on what, with which result: one row a combination, as JSON lines that a person can read.

Scripts that measure something write rows with `make_row` and `write_rows`; vLLM-Omni need not be there for that.
"""

from vllm_omni_diffusion_compile.evidence.checkpoint import revision
from vllm_omni_diffusion_compile.evidence.files import read_rows, row_named, write_rows
from vllm_omni_diffusion_compile.evidence.machine import environment, hardware, versions
from vllm_omni_diffusion_compile.evidence.row import (
    Figure,
    Key,
    Provenance,
    Row,
    Trace,
    digest,
    file_digest,
    make_row,
)

__all__ = [
    "Figure",
    "Key",
    "Provenance",
    "Row",
    "Trace",
    "digest",
    "environment",
    "file_digest",
    "hardware",
    "make_row",
    "read_rows",
    "revision",
    "row_named",
    "versions",
    "write_rows",
]
