"""A transformer in its real size with random weights: what compile scopes gain and what they cost.

    python -m tools.benchmarks.gpu.scopes OUT.json

Arms: eager, the release's regional scope (twice, which shows the noise; the second finds the first one's caches), ours,
and full scope. Each is a process of its own, with empty caches, set up by the release's own worker and model runner;
they take turns on one accelerator. First each makes its first forward, then all go round by round. OUT.json is written
anew after every step, so that a run which is cut short has told what it knew. `--tiny` is a dry run without one.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.benchmarks.gpu.arms import Process, plugins
from tools.benchmarks.gpu.transformers import TRANSFORMERS

FORWARDS = 5  # timed in a turn
ROUNDS = 6


@dataclass(frozen=True)
class Arm:
    """One way to run the transformer.

    Args:
        name: In the results.
        scope: `eager`, `regional` or `full`.
        ours: Whether this package is there.
        caches: Name of the arm whose caches it finds; its own, which are empty, if there is no other.
        workers: Whether ours starts inductor's compile workers before the weights are there, as it does in a server.
    """

    name: str
    scope: str
    ours: bool
    caches: str = ""
    workers: bool = True


EAGER = Arm("eager", "eager", ours=False)
STOCK = Arm("stock regional", "regional", ours=False)
AGAIN = Arm("stock regional, again", "regional", ours=False, caches=STOCK.name)
OURS = Arm("ours regional", "regional", ours=True)
LATE = Arm("ours regional, workers not ahead", "regional", ours=True, workers=False)
OURS_FULL = Arm("ours full", "full", ours=True)
STOCK_FULL = Arm("stock full", "full", ours=False)
REGIONAL = (EAGER, STOCK, OURS, AGAIN, LATE)
FULL = (OURS_FULL, STOCK_FULL)
COLD = (OURS, LATE, STOCK, OURS_FULL, STOCK_FULL, AGAIN)


@dataclass(frozen=True)
class Setup:
    """What all arms have in common: the model and its options, where their files lie, and the sizes."""

    model: str
    options: dict[str, Any]
    folder: str
    sizes: Sequence[int]


class Model:
    """The transformer of one arm, in the arm's own process."""

    def __init__(self, arm: Arm, setup: Setup) -> None:
        if arm.ours:
            import vllm_omni_diffusion_compile.offline  # noqa: F401 - importing it registers the plugin
        import torch
        from torch import nn
        from vllm_omni.diffusion.data import OmniDiffusionConfig
        from vllm_omni.diffusion.worker.diffusion_worker import DiffusionWorker
        from vllm_omni.platforms import current_omni_platform

        scope = {} if arm.scope == "eager" else {"diffusion_compile_granularity": arm.scope}
        self._config = OmniDiffusionConfig(
            model="", model_class_name=TRANSFORMERS[setup.model].pipeline, dtype=torch.bfloat16, num_gpus=1,
            master_port=_free_port(), enforce_eager=arm.scope == "eager", **scope,
        )  # fmt: skip
        self._worker = DiffusionWorker(local_rank=0, rank=0, od_config=self._config, skip_load_model=True)
        self._runner = self._worker.model_runner
        current_omni_platform.init_diffusion_model_runner_runtime(
            vllm_config=self._worker.vllm_config, od_config=self._config, device=self._worker.device
        )  # as load_model does
        self._model, self._options = TRANSFORMERS[setup.model], setup.options
        if arm.ours and arm.workers:
            from vllm_omni_diffusion_compile.compile.workers import start_workers

            start_workers()  # as the wrapped load_model does
        with self._surroundings():
            self._transformer = self._build()
        self._runner.pipeline = nn.Module()
        self._runner.pipeline.transformer = self._transformer
        self._inputs: dict[int, dict[str, Any]] = {}
        self.forward(setup.sizes[0])  # eagerly, so that libraries are loaded and none of that is taken for compilation
        if arm.scope != "eager":
            self._runner._compile_transformer("transformer")  # noqa: SLF001 - what load_model calls
        grafted = hasattr(type(self._runner)._compile_transformer, "__wrapped__")  # noqa: SLF001 - see above
        if grafted != arm.ours:
            raise RuntimeError(f"{arm.name}: this package is {'not ' * arm.ours}there")

    def _build(self) -> Any:
        import torch
        from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
        from vllm.utils.torch_utils import set_default_torch_dtype
        from vllm_omni.diffusion.config import set_current_diffusion_config

        device = self._worker.device
        with set_current_diffusion_config(self._config), set_default_torch_dtype(torch.bfloat16), device:
            transformer = self._model.build(**self._options).eval().requires_grad_(False)
        generator = torch.Generator(device).manual_seed(0)
        with torch.no_grad():
            for name, parameter in transformer.named_parameters():
                parameter.normal_(generator=generator)
                if parameter.ndim >= 2:
                    parameter.mul_(parameter[0].numel() ** -0.5)
                else:
                    parameter.mul_(0.1).add_(1.0 if name.endswith("weight") else 0.0)
        for part in transformer.modules():
            if isinstance(method := getattr(part, "quant_method", None), QuantizeMethodBase):
                method.process_weights_after_loading(part)
        return transformer

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        """What the model runner puts around loading and requests."""
        from vllm_omni.diffusion.forward_context import set_forward_context

        config = self._worker.vllm_config
        with set_forward_context(vllm_config=config, omni_diffusion_config=self._config):
            yield

    def _input(self, size: int) -> dict[str, Any]:
        if size not in self._inputs:
            self._inputs[size] = self._model.inputs(self._transformer, size)
        return self._inputs[size]

    def forward(self, size: int) -> float:
        """Run it once; return seconds."""
        import torch

        with torch.inference_mode(), self._surroundings():
            given = {
                name: list(value) if isinstance(value, list) else value for name, value in self._input(size).items()
            }
            _synchronize()
            start = time.perf_counter()
            self._last = self._transformer(**given)
            _synchronize()
            return time.perf_counter() - start

    def first(self, size: int) -> dict[str, Any]:
        """Run it for the first time at a size, and a few times after that."""
        from torch._dynamo.utils import compilation_time_metrics, counters, get_compilation_metrics

        before, known = counters["stats"]["unique_graphs"], len(get_compilation_metrics())
        first, *then = [self.forward(size) for _ in range(4)]
        records = get_compilation_metrics()[known:]
        return {
            "first_s": first, "then_s": then, "cold_s": first - statistics.median(then),
            "graphs": counters["stats"]["unique_graphs"] - before,
            "torch_says_s": sum(record.duration_us or 0 for record in records) / 1e6,
            "failed": [record.fail_reason for record in records if record.fail_type],
            # Torch's own names of what it timed; they lie within one another, so they do not add up.
            "phases_s": {name: round(sum(seconds), 3) for name, seconds in compilation_time_metrics.items()},
        }  # fmt: skip

    def turn(self, size: int) -> list[float]:
        """Milliseconds of some forwards, after one that is not counted."""
        return [1000 * seconds for seconds in [self.forward(size) for _ in range(FORWARDS + 1)][1:]]

    def output(self) -> list[float]:
        """Return what the last forward gave."""
        output = self._last[0]
        values: list[float] = (output[0] if isinstance(output, list) else output).float().flatten().tolist()
        return values

    def facts(self) -> dict[str, Any]:
        """Where this ran, and whether anything fell back."""
        import torch
        import vllm_omni

        forwards = [getattr(module, "forward", None) for module in self._transformer.modules()]
        forwards.append(getattr(self._transformer, "_compiled_call_impl", None))
        cuda = torch.cuda.is_available()
        return {
            "device": torch.cuda.get_device_name() if cuda else "cpu",
            "torch": torch.__version__,
            "vllm_omni": vllm_omni.__version__,
            "attention": self._model.timed(self._transformer).backend_pref,
            "parameters": sum(parameter.numel() for parameter in self._transformer.parameters()),
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
            "guarded_regions": sum(hasattr(forward, "latched") for forward in forwards),
            "fallen_back": sum(getattr(forward, "latched", False) for forward in forwards),
        }


def _synchronize() -> None:
    import torch

    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
        return port


def _process(arm: Arm, setup: Setup) -> Process:
    own = Path(setup.folder) / (arm.caches or arm.name).replace(" ", "-")
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": str(own / "inductor"), "TRITON_CACHE_DIR": str(own / "triton"),
        "VLLM_PLUGINS": plugins(arm.ours),
    }  # fmt: skip
    return Process(Model, arm, setup, temporary=own / "tmp", environment=environment)


class Run:
    """The whole measurement, step by step.

    Args:
        out: Where the results are written after each step.
        setup: See `Setup`.
        deadline: `time.monotonic()` at which it has to end.
    """

    def __init__(self, out: Path, setup: Setup, deadline: float) -> None:
        self._out = out
        self._sizes = setup.sizes
        self._deadline = deadline
        self._started = time.monotonic()
        self.result: dict[str, Any] = {"model": setup.model, "options": setup.options, "arms": {}, "at_s": {}}
        self.processes: dict[Arm, Process] = {}
        for arm in (*REGIONAL, *FULL):
            process = self.processes[arm] = _process(arm, setup)
            process.result["samples_ms"] = {}
            self.result["arms"][arm.name] = process.result
        for process in self.processes.values():
            process.tell("facts")
        for process in self.processes.values():
            process.result["facts"] = process.answer(self.left_s())
        self._done("ready")

    def first(self, arms: Sequence[Arm], sizes: Sequence[int], limit_s: float) -> None:
        """The first forward of each, one after the other."""
        for arm in arms:
            process = self.processes[arm]
            for size in sizes:
                process.result[f"first at {size}"] = process.ask(min(limit_s, self.left_s()), "first", size)
            self._done(f"first of {arm.name}")

    def rounds(self, arms: Sequence[Arm], sizes: Sequence[int], rounds: int) -> None:
        """Turns of all arms; who begins moves on by one every round."""
        for size in sizes:
            for number in range(rounds):
                for arm in [*arms[number % len(arms) :], *arms[: number % len(arms)]]:
                    samples = self.processes[arm].ask(self.left_s(), "turn", size)
                    if samples is not None:
                        self.processes[arm].result["samples_ms"].setdefault(str(size), []).append(samples)
            self._done(f"rounds at {size} of {', '.join(arm.name for arm in arms)}")

    def outputs(self, arms: Sequence[Arm]) -> None:
        """How far apart the outputs are, relative to their length."""
        outputs = {arm.name: self.processes[arm].ask(self.left_s(), "output") for arm in arms}
        reference = outputs[arms[0].name]
        for name, values in outputs.items():
            if reference is not None and values is not None:
                distance = sum((a - b) ** 2 for a, b in zip(values, reference, strict=True))
                length = sum(value * value for value in reference)
                self.result["arms"][name][f"distance from {arms[0].name}"] = (distance / length) ** 0.5
        for arm in arms:
            self.processes[arm].result["facts"] = self.processes[arm].ask(self.left_s(), "facts")
        self._done("outputs")

    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self._deadline - time.monotonic()

    def stop(self) -> None:
        """End all processes."""
        for process in self.processes.values():
            process.stop()

    def _done(self, step: str) -> None:
        self.result["at_s"][step] = round(time.monotonic() - self._started, 1)
        self.result["summary"] = summary(self.result["arms"], self._sizes)
        self._out.write_text(json.dumps(self.result, indent=1) + "\n")
        print(f"{self.result['at_s'][step]:6.1f} s: {step}", flush=True)


def summary(arms: dict[str, Any], sizes: Sequence[int]) -> dict[str, Any]:
    """Medians and the ratios that matter."""
    told: dict[str, Any] = {}
    medians: dict[tuple[str, str], float] = {}
    for name, arm in arms.items():
        for size, turns in arm["samples_ms"].items():
            medians[name, size] = statistics.median(sample for turn in turns for sample in turn)
            told[f"{name}, {size}, ms"] = round(medians[name, size], 3)
    cold = {name: first["cold_s"] for name, arm in arms.items() if (first := arm.get(f"first at {sizes[0]}"))}
    told |= {
        f"{name}, {'caches there' if name == AGAIN.name else 'cold'}, s": round(seconds, 2)
        for name, seconds in cold.items()
        if name != EAGER.name
    }
    for size in map(str, sizes):
        for arm in (OURS, AGAIN, EAGER):
            if (arm.name, size) in medians and (STOCK.name, size) in medians:
                ratio = medians[arm.name, size] / medians[STOCK.name, size]
                told[f"{arm.name} / {STOCK.name}, {size}"] = round(ratio, 4)
    for one, other in ((OURS, OURS_FULL), (STOCK, STOCK_FULL), (OURS, STOCK)):
        if one.name in cold and other.name in cold:
            told[f"cold: {one.name} / {other.name}"] = round(cold[one.name] / cold[other.name], 4)
    told |= {f"{name} FAILED": arm["error"].strip().splitlines()[-1] for name, arm in arms.items() if "error" in arm}
    return told


def main() -> None:
    """Measure and write down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", choices=sorted(TRANSFORMERS), default="z_image")
    parser.add_argument("--layers", type=int, default=30, help="main blocks; z_image has 4 more beside them")
    parser.add_argument("--deadline", type=float, default=200, help="seconds after which what is missing is left out")
    parser.add_argument("--tiny", action="store_true", help="a tiny transformer and small images")
    parser.add_argument("--cold", action="store_true", help="only how long the first forward takes, at the first size")
    options = parser.parse_args()
    deadline = time.monotonic() + options.deadline
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="scopes-", ignore_cleanup_errors=True))
        model = TRANSFORMERS[options.model]
        sizes = (128, 64) if options.tiny else model.sizes
        real = {**model.options, model.layers: options.layers}
        setup = Setup(options.model, dict(model.tiny if options.tiny else real), folder, sizes)
        run = Run(options.out, setup, deadline)
        stack.callback(run.stop)
        if options.cold:
            run.first(COLD, sizes[:1], limit_s=options.deadline / 2)
            print(json.dumps(run.result["summary"], indent=1), flush=True)
            return
        # What hangs must not take the time of the others.
        run.first(REGIONAL, sizes, limit_s=options.deadline / 3)
        run.rounds(REGIONAL, sizes, ROUNDS)
        run.outputs(REGIONAL)
        for arm in FULL:
            # What one scope took says what the other will.
            taken = (run.result["arms"][OURS_FULL.name].get(f"first at {sizes[0]}") or {}).get("first_s", 0)
            if run.left_s() > 1.3 * taken:
                run.first([arm], sizes[:1], limit_s=options.deadline)
        run.rounds([OURS, OURS_FULL], sizes[:1], 2)
        print(json.dumps(run.result["summary"], indent=1), flush=True)


if __name__ == "__main__":
    main()
