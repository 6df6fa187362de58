"""Build every model family small and print what is compiled of it: `python -m tools.model_families [FAMILY ...]`.

With `--parity` the outputs are compared instead: eager against regional against full, static and dynamic.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import sys
import time
from collections import Counter
from pathlib import Path

import torch

from tools.model_families import parity, table
from tools.model_families.families import FAMILIES
from tools.model_families.family import Family
from tools.model_families.measure import measure


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns 1 if ours says something false or leaves a family out in silence."""
    parser = argparse.ArgumentParser(prog="python -m tools.model_families", description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="only these (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument("--write", action="store_true", help="write the page of the documentation (all families)")
    parser.add_argument("--static", action="store_true", help="with static shapes (default: dynamic)")
    parser.add_argument("--full", action="store_true", help="whole components (default: regional)")
    parser.add_argument("--parity", action="store_true", help="compare outputs instead of counting blocks")
    parser.add_argument("--device", default="cpu", help="of --parity: where they run (default: cpu)")
    parser.add_argument("--backend", default="inductor", help="of --parity: what compiles (default: inductor)")
    options = parser.parse_args(arguments)
    known = {family.name: family for family in FAMILIES}
    if unknown := [name for name in options.families if name not in known]:
        parser.error(f"found the families {', '.join(unknown)}, expected some of: {', '.join(known)}")
    if options.write and options.families:
        parser.error("--write needs all families; leave their names out")
    chosen = [known[name] for name in options.families] or list(FAMILIES)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    _host_speaks_up_only_for_errors()
    if options.parity:
        torch.set_default_device(options.device)
        # An fp32 reference is computed in fp32.
        torch.backends.cudnn.allow_tf32 = False
        return _parity(chosen, options.backend, options.json)
    return _table(chosen, options)


def _table(families: list[Family], options: argparse.Namespace) -> int:
    from vllm_omni import __version__

    output = table.console()
    rows = []
    granularity = "full" if options.full else "regional"
    started = time.monotonic()
    for family in families:
        if not family.pipeline:
            continue
        print(f"{time.monotonic() - started:4.0f} s  {family.name}", file=sys.stderr)
        rows.append(measure(family, granularity=granularity, dynamic=not options.static))
    output.print(table.table(rows, plain=not output.is_terminal))
    for sentence in table.summary(rows):
        output.print(sentence)
    if options.json:
        options.json.write_text(json.dumps([row.to_json() for row in rows], indent=2) + "\n")
    if options.write:
        table.PAGES[granularity].write_text(table.page(rows, __version__, granularity))
    faults = [f"{row.family.name}: {fault}" for row in rows for fault in row.faults]
    for fault in faults:
        output.print(fault)
    return 1 if faults else 0


def _parity(families: list[Family], backend: str, file: Path | None) -> int:
    from vllm_omni_diffusion_compile.upstream import activation

    activation.activate()
    results = []
    for family in families:
        for result in parity.compare(family, parity.ways(backend)):
            print(result, flush=True)
            results.append(result)
            if file:  # anew each time, so that a run which is cut short has told what it knew
                file.write_text(json.dumps([result.to_json() for result in results], indent=2) + "\n")
    verdicts = Counter(result.verdict for result in results)
    print(
        f"{verdicts['holds']} of {len(results)} comparisons hold, {verdicts['FAILS']} fail; "
        f"in {verdicts['not compared']} nothing was compiled"
    )
    return 1 if verdicts["FAILS"] else 0


def _host_speaks_up_only_for_errors() -> None:
    import vllm_omni  # noqa: F401 - sets up its logging while it is imported

    for name in ("vllm", "vllm_omni"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    # The host's loader collects garbage for every model; what it and torch have imported need not be walked each time.
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    sys.exit(main())
