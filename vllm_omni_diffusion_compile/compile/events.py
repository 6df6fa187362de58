"""What the compiler did in this process, as torch counts it."""

from __future__ import annotations

import sys


def compiled_graphs() -> int:
    """Number of graphs that TorchDynamo has compiled in this process; each recompilation adds at least one.

    Source: `torch._dynamo.utils.counters["stats"]["unique_graphs"]`, which torch counts up for every graph it hands to
    a backend. Nothing was compiled in a process that has not imported `torch._dynamo`.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0
