"""What tests/unit/compile/test_ranks.py checks with gloo, with NCCL, one accelerator a rank and inductor.

    python -m tools.benchmarks.gpu.ranks OUT.json
    python -m tools.benchmarks.gpu.ranks OUT.json --backend gloo --device cpu

It needs torch, pytest and this package; no vLLM-Omni.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[3] / "tests/unit/compile/test_ranks.py"
WORLD = 2
LIMIT_S = 75.0


def checks(module: Any, told: list[dict[str, Any]]) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the tests of the module, those of one story once for each story."""
    for name, test in vars(module).items():
        if not name.startswith("test_"):
            continue
        if "story" in test.__annotations__:
            for story in module.FAILURES:
                yield f"{name}[{story}]", lambda test=test, story=story: test(told, story)  # type: ignore[misc]
        else:
            yield name, lambda test=test: test(told)  # type: ignore[misc]


def main() -> int:
    """Run the ranks, check what they tell, and write it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--backend", default="nccl")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compiler", default="inductor")
    options = parser.parse_args()
    spec = importlib.util.spec_from_file_location("test_ranks", TESTS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    result: dict[str, Any] = {name: getattr(options, name) for name in ("backend", "device", "compiler")}
    chosen = [f"--{name}={value}" for name, value in result.items()]
    with tempfile.TemporaryDirectory() as folder:
        try:
            told = module.run_ranks(WORLD, Path(folder), *chosen, timeout_s=LIMIT_S)
        except Exception:  # noqa: BLE001 - written down with what the ranks said on the way
            told, result["error"] = None, traceback.format_exc()[-2000:]
        result["said"] = [path.read_text()[-6000:].splitlines() for path in sorted(Path(folder).glob("err*"))]
    if told is not None:
        result["told"] = json.loads(json.dumps(told))
        result["checks"] = {}
        for name, check in checks(module, told):
            try:
                check()
                result["checks"][name] = "passed"
            except Exception as error:  # noqa: BLE001 - a check that failed; the others are made too
                result["checks"][name] = f"FAILED: {error!r}"
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    outcomes = list(result.get("checks", {}).values())
    for said in () if told is not None and set(outcomes) == {"passed"} else result["said"]:
        print("\n".join(said[-25:]))
    print(json.dumps({key: result.get(key) for key in ("error", "checks")}, indent=1))
    if told is not None:
        print("counted:", json.dumps(result["told"][0]["counted"]))
    print(f"{outcomes.count('passed')} passed, {len(outcomes) - outcomes.count('passed')} failed")
    return int(told is None or set(outcomes) != {"passed"})


if __name__ == "__main__":
    sys.exit(main())
