"""Flux2-Klein with its real widths and random weights, in process through `Omni`: the release, ours, and ours in full.

    python -m tools.benchmarks.gpu.klein CHECKPOINT OUT.json
    python -m tools.benchmarks.gpu.klein CHECKPOINT OUT.json --arm stock --arm ours --arm warm

Each arm is a process of its own with a folder of its own for what it compiles; they start one after the other and then
take turns, request by request, on one accelerator. `warm` starts with what `ours` left, `full-warm` with what `full`
left, and `unthreaded` as `warm` does, but it is warmed up in another thread than it serves in, as the release is.
OUT.json is written anew after every step, so that a run which is cut short has told what it knew.

Beside the seconds of each request stands what can make one slow without compiling: seconds of Python's garbage
collection, and calls of cudaMalloc. Each size is asked for in two rounds. The first request of the second round meets
a server that has answered many of its size, and others since.

CHECKPOINT is written where it does not exist, as `tools.benchmarks.gpu.checkpoints klein_3_9b` writes it. `--tiny`
serves a tiny checkpoint, for a dry run without an accelerator.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tools.benchmarks.gpu.arms import Process, plugins

SIZES = ((1024, 1024), (1344, 768), (768, 768))
STEPS = 4


@dataclass(frozen=True)
class Arm:
    """One way to serve it.

    Args:
        name: In the results.
        ours: Whether this package is there, with the sizes declared.
        settings: Further keyword arguments of `Omni`.
        caches: Name of the arm whose folder it uses, if not its own.
        one_thread: Whether warmup and requests are computed in one thread, as they are with this package.
    """

    name: str
    ours: bool
    settings: Mapping[str, Any] = field(default_factory=dict)
    caches: str = ""
    one_thread: bool = True


ARMS = (
    Arm("stock", ours=False),
    Arm("ours", ours=True),
    Arm("full", ours=True, settings={"diffusion_compile_granularity": "full"}),
    Arm("warm", ours=True, caches="ours"),
    Arm("unthreaded", ours=True, caches="ours", one_thread=False),
    Arm("full-warm", ours=True, settings={"diffusion_compile_granularity": "full"}, caches="full"),
)


class Model:
    """`Omni` in the process of its arm."""

    def __init__(self, arm: Arm, checkpoint: str, sizes: Sequence[tuple[int, int]]) -> None:
        if arm.ours:
            import vllm_omni_diffusion_compile.offline  # noqa: F401 - importing it registers the plugin
        import vllm_omni  # noqa: F401 - imports are not part of what is timed
        from torch._dynamo.utils import counters
        from vllm_omni.entrypoints.omni import Omni

        settings = dict(arm.settings)
        if arm.ours:
            shapes = [f"{width}x{height}" for width, height in sizes]
            settings["diffusion_compile_config"] = {"warmup": {"shapes": shapes}}
        if not arm.one_thread:
            mock.patch("vllm_omni_diffusion_compile.upstream.shapes.warm_where_it_serves").start()
        self._graphs = counters["stats"]
        self._collecting = Collecting()
        start = time.perf_counter()
        self._omni = Omni(model=checkpoint, stage_init_timeout=1800, init_timeout=1800, **settings)
        self._ready_s = time.perf_counter() - start

    def about(self) -> dict[str, Any]:
        """Seconds until it was ready, graphs so far, and the most memory so far."""
        cuda = torch.cuda.is_available()
        return {
            "ready_s": self._ready_s,
            "graphs": self._graphs["unique_graphs"],
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if cuda else "cpu",
        }

    def request(self, width: int, height: int) -> dict[str, float]:
        """Ask for one picture; return seconds, those of garbage collection within, and calls of cudaMalloc."""
        from vllm_omni.inputs.data import OmniDiffusionSamplingParams

        params = OmniDiffusionSamplingParams(width=width, height=height, num_inference_steps=STEPS, seed=1)
        collecting, allocations = self._collecting.seconds, _device_allocations()
        start = time.perf_counter()
        self._omni.generate({"prompt": "a lighthouse at dusk"}, params, use_tqdm=False)
        return {
            "seconds": time.perf_counter() - start,
            "gc_s": self._collecting.seconds - collecting,
            "device_allocations": _device_allocations() - allocations,
        }


class Collecting:
    """Counts seconds of Python's garbage collection in this process."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._started = 0.0
        gc.callbacks.append(self._told)

    def _told(self, phase: str, _: Mapping[str, int]) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._started = now
        else:
            self.seconds += now - self._started


def _device_allocations() -> int:
    """Calls of cudaMalloc so far."""
    return int(torch.cuda.memory_stats().get("num_device_alloc", 0)) if torch.cuda.is_available() else 0


def _process(arm: Arm, checkpoint: str, folder: Path, sizes: Sequence[tuple[int, int]]) -> Process:
    own = folder / (arm.caches or arm.name)
    environment = {"VLLM_CACHE_ROOT": str(own), "VLLM_PLUGINS": plugins(arm.ours)}
    return Process(Model, arm, checkpoint, sizes, temporary=own / "tmp", environment=environment)


def summary(arms: Mapping[str, Mapping[str, Any]], sizes: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Medians and the ratios that matter."""
    told: dict[str, Any] = {}
    for size in [f"{width}x{height}" for width, height in sizes]:
        medians: dict[str, float] = {}
        for name, arm in arms.items():
            first, *further = arm.get("seconds", {}).get(size, [None])
            if first is None or not further:
                continue
            again = arm.get("again", {}).get("seconds", {}).get(size, [])
            further += again[1:]
            medians[name] = statistics.median(further)
            told[f"{size}, {name}, median s"] = round(medians[name], 4)
            told[f"{size}, {name}, first / median"] = round(first / medians[name], 3)
            if again:
                told[f"{size}, {name}, first of the second round / median"] = round(again[0] / medians[name], 3)
            if name != "stock" and "stock" in medians:
                told[f"{size}, {name} / stock"] = round(medians[name] / medians["stock"], 4)
    for name, arm in arms.items():
        if arm.get("at ready"):
            told[f"{name}, ready, s"] = round(arm["at ready"]["ready_s"], 1)
        if arm.get("at the end"):
            told[f"{name}, graphs after ready"] = arm["at the end"]["graphs"] - arm["at ready"]["graphs"]
        if "error" in arm:
            told[f"{name}, FAILED"] = arm["error"].strip().splitlines()[-1]
    return told


def main() -> None:
    """Measure and write down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    names = [arm.name for arm in ARMS]
    parser.add_argument("--arm", action="append", choices=names, help="default: stock, ours and full")
    parser.add_argument("--size", action="append", metavar="WxH", help="default: 1024x1024, 1344x768 and 768x768")
    parser.add_argument("--turns", type=int, default=20, help="requests of each arm and size after the first")
    parser.add_argument("--deadline", type=float, default=540, help="seconds after which what is missing is left out")
    parser.add_argument("--tiny", action="store_true", help="the checkpoint is a tiny one that exists")
    options = parser.parse_args()
    started = time.monotonic()
    if not options.tiny and not options.checkpoint.exists():
        # In a process of its own, so that its memory and its imports are not measured.
        writer = "tools.benchmarks.gpu.checkpoints"
        subprocess.run([sys.executable, "-m", writer, "klein_3_9b", str(options.checkpoint)], check=True)
    sizes: Sequence[tuple[int, int]] = ((256, 256), (256, 320)) if options.tiny else SIZES
    if options.size:
        sizes = [(int(width), int(height)) for width, _, height in (size.partition("x") for size in options.size)]
    result: dict[str, Any] = {"arms": {}, "at_s": {}}

    def left_s() -> float:
        return started + float(options.deadline) - time.monotonic()

    def done(step: str) -> None:
        result["at_s"][step] = round(time.monotonic() - started, 1)
        result["summary"] = summary(result["arms"], sizes)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        print(f"{result['at_s'][step]:6.1f} s: {step}", flush=True)

    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="klein-", ignore_cleanup_errors=True))
        processes: dict[str, Process] = {}
        for arm in ARMS:
            if arm.name in (options.arm or ("stock", "ours", "full")):
                process = _process(arm, str(options.checkpoint), Path(folder), sizes)
                stack.callback(process.stop)
                processes[arm.name], result["arms"][arm.name] = process, process.result
                # What starting takes must not take the time of the turns.
                process.result["at ready"] = process.ask(left_s() - 60, "about")
                done(f"{arm.name} is ready")
        order = list(processes.values())
        for again, (width, height) in itertools.product((False, True), sizes):
            for turn in range(1 + options.turns):
                for process in order[turn % len(order) :] + order[: turn % len(order)]:
                    kept = process.result.setdefault("again", {}) if again else process.result
                    asked = process.ask(left_s(), "request", width, height)
                    for what, value in (asked or {}).items():
                        kept.setdefault(what, {}).setdefault(f"{width}x{height}", []).append(value)
            done(f"turns at {width}x{height}" + ", again" * again)
        for process in order:
            process.result["at the end"] = process.ask(left_s(), "about")
        done("end")
        print(json.dumps(result["summary"], indent=1), flush=True)


if __name__ == "__main__":
    main()
