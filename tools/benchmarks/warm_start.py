"""What the compile cache saves the next start: a tiny Klein with 30 blocks, served twice with the same cache.

    python -m tools.benchmarks.warm_start --scope regional

Both starts have private caches; the second finds what the first has kept, and nothing else of it. Seconds of compiling
are those of the server's own metric, before it was ready. VAE decode is compiled in neither: what is asked is what the
transformer costs.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.serve.server import Server
from tools.tiny_checkpoints import klein

BLOCKS = {"num_layers": 10, "num_single_layers": 20}
READY_S = 1800.0
_SECONDS = re.compile(r'^vllm_omni:diffusion_compile_s_total\{.*after_ready="false".*\} (\S+)$', re.MULTILINE)


def measure(checkpoint: Path, folder: Path, scope: str) -> dict[str, Any]:
    """Start a server twice; return seconds of compiling and until ready of each start."""
    starts: dict[str, Any] = {}
    options = ("--diffusion-compile-granularity", scope, "--no-diffusion-compile-vae")
    config = json.dumps({"warmup": {"shapes": ["256x256"]}, "cache_dir": str(folder / scope)})
    for start in ("cold", "warm"):
        with Server(checkpoint, *options, "--diffusion-compile-config", config, ready_timeout_s=READY_S) as server:
            told = server.get("/metrics").text
            starts[start] = {
                "compile_s": sum(float(seconds) for seconds in _SECONDS.findall(told)), "ready_s": server.startup_s,
            }  # fmt: skip
    return starts


def main() -> None:
    """Measure the scopes that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--scope", choices=("regional", "full"), action="append", help="default: both")
    parser.add_argument("--json", type=Path, help="also write everything there")
    arguments = parser.parse_args()
    table = Table("scope", "compiling cold, s", "warm, s", "ratio", "ready cold, s", "warm, s", "ratio")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="warm-start-") as name:
        folder = Path(name)
        checkpoint = folder / "klein"
        checkpoint.mkdir()
        klein.write(checkpoint, transformer=functools.partial(klein.tiny_transformer, **BLOCKS))
        for scope in arguments.scope or ("regional", "full"):
            results[scope] = measure(checkpoint, folder, scope)
            cells: list[str] = []
            for what in ("compile_s", "ready_s"):
                cold, warm = results[scope]["cold"][what], results[scope]["warm"][what]
                cells += [f"{cold:.1f}", f"{warm:.1f}", f"{warm / cold:.2f}"]
            table.add_row(scope, *cells)
            if arguments.json:
                arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    Console().print(table)


if __name__ == "__main__":
    main()
