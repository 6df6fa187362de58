"""Block-sparse video attention against dense attention on one GPU: the whole operation, its parts, and its kernels.

    python -m tools.benchmarks.gpu.rainfusion OUT.json

Dense is the fastest of FlashAttention-3, FlashAttention-4 and cuDNN that are installed, in the same run. The whole
operation is order, pooling, selection, attention of both kinds of blocks, and inverse. Candidates take turns, so that a
clock that changes changes all. Inputs are random unless said otherwise, which is the worst case: a query block then
chooses beside the protected blocks, and the density is near the most it can be. OUT.json is written anew after every
step, so that a run which is cut short has told what it knew. `--dry-run` runs the same code without a GPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention.flex_attention import flex_attention

from vllm_omni_diffusion_compile.rainfusion.cost import reason_not_worth_it, share_of_dense
from vllm_omni_diffusion_compile.rainfusion.executors import Executor
from vllm_omni_diffusion_compile.rainfusion.executors.flash import Flash, FlashError
from vllm_omni_diffusion_compile.rainfusion.executors.flex import Flex, _block_mask
from vllm_omni_diffusion_compile.rainfusion.executors.reference import Reference
from vllm_omni_diffusion_compile.rainfusion.geometry import Grid, Layout, Plan, plan
from vllm_omni_diffusion_compile.rainfusion.operation import Dense, SparseAttention, dense_sdpa
from vllm_omni_diffusion_compile.rainfusion.selection import Selection, pool, select

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

SPARSITIES = (0.8, 0.9)
ROUNDS, CALLS = 3, 4


@dataclass(frozen=True)
class Setup:
    """What a run is made of: device, heads, head size, and layouts, of which the first is the main one."""

    device: str
    dtype: torch.dtype
    heads: int
    size: int
    layouts: Mapping[str, Layout]
    small: Layout

    @property
    def scale(self) -> float:
        """Of the scores."""
        return float(self.size**-0.5)

    def inputs(self, layout: Layout, *, smooth: bool = False) -> Inputs:
        """Make query, key and value of a layout: random ones, or such as neighbours in space and time share."""
        generator = torch.Generator(self.device).manual_seed(0)
        shape = (1, layout.used, self.heads, self.size)
        kind: dict[str, Any] = {"generator": generator, "device": self.device}
        query, key, value = (torch.randn(shape, **kind) for _ in range(3))
        if smooth:
            for span in layout.spans:
                rows = slice(span.start, span.start + span.grid[0] * span.grid[1] * span.grid[2])
                coarse: Grid = tuple(max(2, length // 6) for length in span.grid)  # type: ignore[assignment]
                field = torch.randn((self.heads, self.size, *coarse), **kind)
                fine = torch.nn.functional.interpolate(field, span.grid, mode="trilinear").flatten(2).permute(2, 0, 1)
                query[0, rows] = 0.5 * query[0, rows] + 1.5 * fine
                key[0, rows] = 0.5 * key[0, rows] + 1.5 * fine
        return query.to(self.dtype), key.to(self.dtype), value.to(self.dtype)


def _layouts(*grids: tuple[int, Grid]) -> dict[str, Layout]:
    return {
        f"{','.join(map(str, grid))} +{prefix}": Layout.after_prefix(prefix, grid) for prefix, grid in grids
    }  # fmt: skip


GPU = Setup(
    "cuda", torch.bfloat16, 8, 128,
    _layouts(
        (710, (62, 24, 42)), (710, (62, 24, 40)), (710, (37, 24, 42)), (0, (21, 45, 80)), (0, (21, 30, 52)),
        (0, (31, 22, 40)), (0, (31, 44, 80)), (500, (62, 12, 21)), (300, (62, 32, 32)), (0, (4, 16, 64)),
    ),
    Layout.after_prefix(100, (9, 24, 26)),
)  # fmt: skip
DRY = Setup(
    "cpu", torch.float32, 2, 32,
    _layouts((100, (9, 24, 26)), (0, (5, 16, 16))), Layout.after_prefix(33, (5, 16, 21)),
)  # fmt: skip


class Clock:
    """Milliseconds of a call on the device."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"

    def once(self, call: Callable[[], object]) -> float:
        """Time one call."""
        if not self._cuda:
            start = time.perf_counter()
            call()
            return 1000 * (time.perf_counter() - start)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    def turns(self, calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        """Let them take turns, and return the median of each. Each is warmed up before."""
        for call in calls.values():
            call()
            call()
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(ROUNDS if self._cuda else 1):
            names = list(calls)
            for name in [*names[number % len(names) :], *names[: number % len(names)]]:
                samples[name] += [self.once(calls[name]) for _ in range(CALLS if self._cuda else 1)]
        return {name: round(statistics.median(values), 4) for name, values in samples.items()}


def _first(out: Any) -> torch.Tensor:
    tensor: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return tensor


def dense_backends(setup: Setup) -> dict[str, Dense]:
    """Return what is installed, by name."""
    scale = setup.scale
    found: dict[str, Dense] = {}
    if setup.device != "cuda":
        return {"sdpa": lambda q, k, v: dense_sdpa(q, k, v, scale)}
    try:
        from fa3_fwd_interface import flash_attn_func as third

        found["fa3"] = lambda q, k, v: _first(third(q, k, v, softmax_scale=scale))
    except ImportError as error:
        print("no FlashAttention-3:", error, flush=True)
    try:
        from flash_attn.cute import flash_attn_func as fourth

        found["fa4"] = lambda q, k, v: _first(fourth(q, k, v, softmax_scale=scale))
    except ImportError as error:
        print("no FlashAttention-4:", error, flush=True)

    def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            return dense_sdpa(q, k, v, scale)

    return found | {"cudnn": cudnn}


class StaticFlex:
    """FlexAttention compiled anew for every length and every set of kernel options: how fast it can be made."""

    takes_a_part = True

    def __init__(self, **options: Any) -> None:
        self.name = "flex static " + " ".join(f"{name}={value}" for name, value in options.items())
        self._options: Any = options
        self._compiled = torch.compile(flex_attention, dynamic=False)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, selection: Selection, scale: float
    ) -> torch.Tensor:
        """See `Executor.attend`."""
        out = self._compiled(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2),
            block_mask=_block_mask(selection, query.shape[1], key.shape[1]), scale=scale,
            kernel_options=self._options,
        )  # fmt: skip
        return _first(out).transpose(1, 2)


def kernels(setup: Setup) -> list[Executor]:
    """Executors of the search: how FlexAttention's kernel is best set up."""
    if setup.device != "cuda":
        return [StaticFlex()]
    return [
        StaticFlex(),
        StaticFlex(BLOCK_M=128, BLOCK_N=128, num_warps=8, num_stages=2),
        StaticFlex(BLOCK_M=128, BLOCK_N=128, num_warps=8, num_stages=3),
        StaticFlex(BLOCK_M=128, BLOCK_N=64, num_warps=4, num_stages=3),
        StaticFlex(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=3),
        StaticFlex(BLOCK_M=128, BLOCK_N=128, num_warps=8, num_stages=2, USE_TMA=True),
        StaticFlex(BLOCK_M=128, BLOCK_N=64, num_warps=4, num_stages=3, USE_TMA=True),
        StaticFlex(BLOCK_M=128, BLOCK_N=128, num_warps=8, num_stages=2, PRESCALE_QK=True, ROWS_GUARANTEED_SAFE=True),
        StaticFlex(BACKEND="FLASH"),
    ]


class Run:
    """The whole measurement, step by step."""

    def __init__(self, out: Path, setup: Setup, deadline: float) -> None:
        self._out, self._setup, self._deadline = out, setup, deadline
        self._started = time.monotonic()
        self._clock = Clock(setup.device)
        self.result: dict[str, Any] = {"at_s": {}, "failed": {}, "environment": _environment(setup), "layouts": {}}
        self._dense = dense_backends(setup)
        self._executors: dict[str, Executor] = {"flex": Flex()}
        try:
            self._executors = {"flash": Flash(), **self._executors}
        except FlashError as error:
            self.result["failed"]["flash"] = str(error)
            if setup.device != "cuda":
                self._executors["reference"] = Reference()
        self._best = next(iter(self._dense))
        self.step("ready", lambda: None)

    def step(self, name: str, do: Callable[[], None]) -> None:
        """Do one step; what fails is told, and the others go on."""
        if time.monotonic() > self._deadline:
            self.result["failed"][name] = "no time was left"
            return
        try:
            do()
        except Exception:  # noqa: BLE001 - it is told, and the other steps go on
            self.result["failed"][name] = traceback.format_exc()[-2500:]
            print(self.result["failed"][name], flush=True)
        self.result["at_s"][name] = round(time.monotonic() - self._started, 1)
        self.result["summary"] = summary(self.result)
        self._out.write_text(json.dumps(self.result, indent=1) + "\n")
        print(f"{self.result['at_s'][name]:6.1f} s: {name}", flush=True)

    def _operation(self, executor: Executor, sparsity: float) -> SparseAttention:
        return SparseAttention(sparsity, self._setup.scale, executor, self._dense[self._best])

    def _plan(self, layout: Layout) -> Plan:
        return plan(layout, torch.empty(0, device=self._setup.device).device)

    def check(self) -> None:
        """Compare every executor with the reference on a small grid, and with dense attention at sparsity 0."""
        layout = self._setup.small
        inputs, made = self._setup.inputs(layout), self._plan(layout)
        told = self.result["check"] = {}
        dense = self._dense[self._best](*inputs)
        for name, executor in self._executors.items():
            wanted = self._operation(Reference(), 0.8)(*inputs, made)
            told[f"{name} at 0.8 from reference"] = _apart(self._operation(executor, 0.8)(*inputs, made), wanted)
            told[f"{name} at 0 from dense"] = _apart(self._operation(executor, 0.0)(*inputs, made), dense)
        told[f"{self._best} from reference at 0"] = _apart(dense, self._operation(Reference(), 0.0)(*inputs, made))

    def layout(self, name: str) -> None:
        """Measure dense backends and whole operations on one layout."""
        layout = self._setup.layouts[name]
        inputs, made = self._setup.inputs(layout), self._plan(layout)
        told: dict[str, Any] = {"rows": layout.used, "reason": layout.reason_to_stay_dense()}
        self.result["layouts"][name] = told
        told["dense_ms"] = self._clock.turns(
            {backend: functools.partial(call, *inputs) for backend, call in self._dense.items()}
        )
        self._best = min(told["dense_ms"], key=told["dense_ms"].__getitem__)
        for sparsity in SPARSITIES:
            entry: dict[str, Any] = {"density": layout.density(sparsity)}
            told[str(sparsity)] = entry
            for executor in self._executors:
                entry[f"{executor} expected"] = share_of_dense(layout, sparsity, executor, self._width)
                entry[f"{executor} stays dense"] = reason_not_worth_it(layout, sparsity, executor, self._width)
            entry |= self._against_dense(inputs, made, sparsity)
            entry["times faster"] = {
                executor: round(entry["ms"]["dense"] / entry["ms"][executor], 3) for executor in self._executors
            }

    def _against_dense(self, inputs: Inputs, made: Plan, sparsity: float) -> dict[str, Any]:
        """Time dense attention and the whole operation with every executor."""
        seen: list[float] = []
        operations = {name: self._operation(executor, sparsity) for name, executor in self._executors.items()}
        for operation in operations.values():
            operation(*inputs, made, lambda selection: seen.append(selection.density(made)))
        calls: dict[str, Callable[[], object]] = {"dense": functools.partial(self._dense[self._best], *inputs)}
        calls |= {name: functools.partial(operation, *inputs, made) for name, operation in operations.items()}
        return {"realised": round(seen[0], 4), "ms": self._clock.turns(calls)}

    @property
    def _width(self) -> int:
        return self._setup.heads * self._setup.size

    def parts(self) -> None:
        """Take the operation on the main layout apart."""
        name, layout = next(iter(self._setup.layouts.items()))
        inputs, made = self._setup.inputs(layout), self._plan(layout)
        query = inputs[0].index_select(1, made.query_order)
        key, value = (part.index_select(1, made.key_order) for part in inputs[1:])
        choosing, chosen = made.choosing_rows, select(query, key, made, 0.8)
        dense, scale = self._dense[self._best], self._setup.scale
        out = torch.empty_like(query)

        def around() -> torch.Tensor:
            ordered = inputs[0].index_select(1, made.query_order)
            keys = inputs[1].index_select(1, made.key_order)
            inputs[2].index_select(1, made.key_order)
            select(ordered, keys, made, 0.8).lists()
            return torch.cat([out[:, :choosing], out[:, choosing:]], 1).index_select(1, made.query_inverse)

        calls: dict[str, Callable[[], object]] = {
            "dense, all": functools.partial(dense, *inputs),
            "order": lambda: [part.index_select(1, made.key_order) for part in inputs],
            "pool": lambda: (pool(query), pool(key)),
            "select, pooling included": lambda: select(query, key, made, 0.8),
            "lists": chosen.lists,
            "join and inverse": lambda: torch.cat([out[:, :choosing], out[:, choosing:]], 1).index_select(
                1, made.query_inverse
            ),
            "everything around the kernels": around,
            "protected queries, dense": lambda: dense(query[:, choosing:], key, value),
        }
        for executor in self._executors.values():
            calls[f"choosing queries, {executor.name}"] = functools.partial(
                executor.attend, query[:, :choosing], key, value, chosen, scale
            )
        told = self.result["parts"] = {"layout": name, "ms": self._clock.turns(calls)}
        whole = told["ms"]["dense, all"]
        told["around, share of dense"] = round(told["ms"]["everything around the kernels"] / whole, 4)
        pairs = float(chosen.mask.float().mean()) * made.choosing_blocks / layout.blocks
        told["cost of a pair against dense"] = {
            executor: round(told["ms"][f"choosing queries, {executor}"] / whole / pairs, 3)
            for executor in self._executors
        }

    def graph(self) -> None:
        """Take what is around the kernel into a graph, with shapes that are static, and leave it outside."""
        name, layout = next(iter(self._setup.layouts.items()))
        inputs, made = self._setup.inputs(layout), self._plan(layout)

        def ordered_and_chosen(*rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
            query = rows[0].index_select(1, made.query_order)
            key, value = (part.index_select(1, made.key_order) for part in rows[1:])
            return query, key, value, *select(query, key, made, 0.8).lists()

        def chosen(query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return select(query, key, made, 0.8).lists()

        inside, selection_inside = (torch.compile(call, dynamic=False) for call in (ordered_and_chosen, chosen))
        calls: dict[str, Callable[[], object]] = {
            "dense, all": functools.partial(self._dense[self._best], *inputs),
            "order and selection, outside": functools.partial(ordered_and_chosen, *inputs),
            "order and selection, inside": functools.partial(inside, *inputs),
            "selection, outside": functools.partial(chosen, *inputs[:2]),
            "selection, inside": functools.partial(selection_inside, *inputs[:2]),
        }
        self.result["graph"] = {"layout": name, "ms": self._clock.turns(calls)}
        print(self.result["graph"], flush=True)

    def smooth(self) -> None:
        """Measure the main layout again with inputs that neighbours share, which choose protected blocks more often."""
        name, layout = next(iter(self._setup.layouts.items()))
        inputs, made = self._setup.inputs(layout, smooth=True), self._plan(layout)
        told = self.result["smooth"] = {"layout": name}
        for sparsity in SPARSITIES:
            told[str(sparsity)] = self._against_dense(inputs, made, sparsity)

    def agreement(self) -> None:
        """Compare executors with one another and with dense attention where no reference fits: on the main layout."""
        layout = next(iter(self._setup.layouts.values()))
        inputs, made = self._setup.inputs(layout), self._plan(layout)
        told = self.result["agreement"] = {}
        dense = self._dense[self._best](*inputs)
        outs = {}
        for name, executor in self._executors.items():
            told[f"{name} at 0 from {self._best}"] = _apart(self._operation(executor, 0.0)(*inputs, made), dense)
            outs[name] = self._operation(executor, 0.8)(*inputs, made)
        names = list(outs)
        told.update(
            {f"{one} from {names[0]} at 0.8": _apart(outs[one], outs[names[0]]) for one in names[1:]}
        )  # fmt: skip

    def kernel(self, executor: Executor) -> None:
        """Time one kernel of the search on the main layout."""
        layout = next(iter(self._setup.layouts.values()))
        inputs, made = self._setup.inputs(layout), self._plan(layout)
        query = inputs[0].index_select(1, made.query_order)
        key, value = (part.index_select(1, made.key_order) for part in inputs[1:])
        chosen = select(query, key, made, 0.8)
        call = functools.partial(
            executor.attend, query[:, : made.choosing_rows], key, value, chosen, self._setup.scale
        )  # fmt: skip
        start = time.monotonic()
        call()
        cold = time.monotonic() - start
        self.result.setdefault("kernels", {})[executor.name] = self._clock.turns({"ms": call}) | {
            "cold_s": round(cold, 1)
        }


def _apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def _environment(setup: Setup) -> dict[str, Any]:
    import importlib.metadata

    versions = {}
    for name in ("flash-attn-4", "fa3-fwd", "nvidia-cutlass-dsl", "triton"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "none"
    cuda = setup.device == "cuda"
    return versions | {
        "torch": torch.__version__, "device": torch.cuda.get_device_name() if cuda else "cpu",
        "heads": setup.heads, "head size": setup.size, "dtype": str(setup.dtype),
    }  # fmt: skip


def summary(result: Mapping[str, Any]) -> dict[str, Any]:
    """How many times faster than dense the operation is, and what `auto` would have done."""
    told: dict[str, Any] = {}
    for name, layout in result["layouts"].items():
        for sparsity in map(str, SPARSITIES):
            entry = layout.get(sparsity, {})
            if "times faster" not in entry:
                continue
            executor = next(iter(entry["times faster"]))
            dense = layout["reason"] or entry[f"{executor} stays dense"]
            told[f"{name} at {sparsity}"] = {
                "density": entry["realised"], **entry["times faster"], "auto": "dense" if dense else executor,
            }  # fmt: skip
    return told


def main() -> None:
    """Measure and write down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--deadline", type=float, default=240, help="seconds after which what is missing is left out")
    parser.add_argument("--only", metavar="STEP", help="of check, parts, graph, agreement and smooth")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on CPU")
    options = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64  # noqa: SLF001 - torch has no public name for it
    setup = DRY if options.dry_run else GPU
    with torch.inference_mode():
        run = Run(options.out, setup, time.monotonic() + options.deadline)
        if options.only:
            run.step(options.only, getattr(run, options.only))
            return
        run.step("check", run.check)
        main_layout, *others = setup.layouts
        run.step(main_layout, functools.partial(run.layout, main_layout))
        run.step("parts", run.parts)
        run.step("graph", run.graph)
        run.step("agreement", run.agreement)
        for name in others:
            run.step(name, functools.partial(run.layout, name))
        run.step("smooth", run.smooth)
        for executor in kernels(setup):
            run.step(f"kernel {executor.name}", functools.partial(run.kernel, executor))
    print(json.dumps(run.result["summary"], indent=1), flush=True)


if __name__ == "__main__":
    main()
