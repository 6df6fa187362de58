"""The ledgers of this checkout, for the checks that read them."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os

from vllm_omni_diffusion_compile.upstream.graft import FieldGraft, Graft

ROW_TABLES = (
    ("vllm_omni_diffusion_compile.upstream.ledger", "GRAFTS"),
    ("vllm_omni_diffusion_compile.platforms.cpu_grafts", "CPU_GRAFTS"),
)


def rows_of(module: str, table: str) -> tuple[Graft, ...]:
    """Import a ledger; empty where this checkout has no such module."""
    package = module.rpartition(".")[0]
    if importlib.util.find_spec(package) is None or importlib.util.find_spec(module) is None:
        return ()
    # vLLM reports on the machine when it is imported; a check has only its own findings to say.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.disable(logging.WARNING)
    try:
        rows: tuple[Graft, ...] = getattr(importlib.import_module(module), table)
    finally:
        logging.disable(logging.NOTSET)
    return rows


def all_rows() -> list[Graft]:
    """Every row of every ledger, in order."""
    return [row for module, table in ROW_TABLES for row in rows_of(module, table)]


def qualified_name(row: Graft) -> str:
    """What a row changes, as `module:Qualified.name`; of a field graft the field."""
    return f"{row.module}:{row.name}" if isinstance(row, FieldGraft) else row.target
