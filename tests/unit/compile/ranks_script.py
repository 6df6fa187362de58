"""One rank of several that run regions together; test_ranks.py starts all of them and reads what they print.

python ranks_script.py RANK WORLD STORE [--backend nccl --device cuda --compiler inductor]
"""

from __future__ import annotations

import argparse
import datetime as dt
import functools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from vllm_omni_diffusion_compile.compile.fallback import FallbackCallable
from vllm_omni_diffusion_compile.compile.latch import Failure, Latch
from vllm_omni_diffusion_compile.compile.ranks import GuardedBackend, RankGroup
from vllm_omni_diffusion_compile.compile.state import ArgumentState
from vllm_omni_diffusion_compile.errors import RankFailedError

DEVICE = torch.device("cpu")
COMPILER = "eager"


class Backend:
    """Compiles a graph with COMPILER, and fails on one rank as told."""

    def __init__(
        self,
        fails_on: int,
        *,
        compiling: int = 0,
        call: int = 0,
        midway: bool = False,
        error: type[Exception] = RuntimeError,
    ) -> None:
        self._here = dist.get_rank() == fails_on
        self._compiling, self._call, self._midway, self._error = compiling, call, midway, error
        self.graphs = self.calls = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        if self._here and self.graphs == self._compiling:
            raise self._error("ptxas died")
        run = torch._dynamo.lookup_backend(COMPILER)(graph, inputs)

        def compiled(*args: Any) -> Any:
            self.calls += 1
            if self._here and self.calls == self._call:
                if self._midway:
                    run(*args)
                raise self._error("kernel fault")
            return run(*args)

        return compiled


class Region:
    """A region as the model runner sets it up, with a record of what closed its latch."""

    def __init__(self, function: Callable[..., Any], ranks: RankGroup, backend: Callable[..., Any], name: str) -> None:
        self.failures: list[str] = []
        latch = Latch(name, self._closed)
        ranks.watch(latch)
        compiled = torch.compile(function, backend=GuardedBackend(backend, ranks, latch), dynamic=False)
        self.call = FallbackCallable(function, compiled, latch, state=ArgumentState(), ranks=ranks)
        self.latch = latch

    def _closed(self, failure: Failure) -> None:
        where = f"rank {failure.rank}: " if failure.rank is not None else ""
        self.failures.append(f"{where}{failure.error_type}: {failure.reason}")


def together(x: torch.Tensor, group: Any = None) -> torch.Tensor:
    """What tensor parallelism does: each its part, then a sum over the ranks."""
    x = x * (dist.get_rank() + 1)
    dist.all_reduce(x, group=group)
    return x + 1


def in_two_parts(x: torch.Tensor) -> torch.Tensor:
    """What Ulysses does: attention with its collectives stays out of the graphs before and after it."""
    return together(exchange(x * 2) * 3)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def exchange(x: torch.Tensor) -> torch.Tensor:
    """Each rank sends its rows to all; the sum of what comes is that of `all_reduce`."""
    sent = x.repeat(dist.get_world_size())
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    return received.reshape(-1, *x.shape).sum(0)


def story(name: str, function: Callable[..., Any], backend: Backend, ranks: RankGroup, calls: int) -> dict[str, Any]:
    torch.compiler.reset()
    x = torch.ones(4, device=DEVICE)
    expected = function(x)
    region = Region(function, ranks, backend, name)
    right = all(torch.equal(region.call(x), expected) for _ in range(calls))
    before = region.latch.closed
    ranks.agree()
    told = list(region.failures)
    calls_so_far = backend.calls
    right = right and torch.equal(region.call(x), expected)
    ranks.agree()
    return {
        "right": right, "closed alone": before, "closed after agreeing": region.latch.closed, "told": told,
        "told twice": region.failures != told, "compiled is called again": backend.calls != calls_so_far,
    }  # fmt: skip


def midway(ranks: RankGroup) -> str:
    torch.compiler.reset()
    region = Region(together, ranks, Backend(1, call=1, midway=True), "transformer.Midway")
    try:
        region.call(torch.ones(4, device=DEVICE))
    except RankFailedError as error:
        return str(error)
    return "answered"


def raised(group: Any) -> list[str]:
    """A failure that is to be raised: two requests with a region that fails to compile on one rank."""
    torch.compiler.reset()
    ranks = RankGroup(group, fails_closed=True)
    region = Region(together, ranks, Backend(1, compiling=1), "transformer.Raised")
    told = []
    for _ in range(2):
        try:
            ranks.run(lambda: region.call(torch.ones(4, device=DEVICE)))
            told.append("answered")
        except RankFailedError as error:
            told.append(f"{error} from {error.__cause__!r}")
    return told


def own_error_of_one(group: Any) -> list[str]:
    """A request that fails on one rank, by itself, and one after it."""
    ranks = RankGroup(group, fails_closed=True)

    def request(fails_on: int) -> str:
        if dist.get_rank() == fails_on:
            raise ValueError("the request's own")
        return "answered"

    told = []
    for fails_on in (1, -1):
        try:
            told.append(ranks.run(functools.partial(request, fails_on)))
        except ValueError as error:
            told.append(str(error))
    return told


def unequal(ranks: RankGroup) -> dict[str, Any]:
    """Packed samples of different lengths: this rank compiles at other calls than the others, and all answer."""
    torch.compiler.reset()
    backend = Backend(1, compiling=2)

    def region_of_unequal(x: torch.Tensor) -> torch.Tensor:
        total = x.sum().reshape(1)
        dist.all_reduce(total)
        return x + total

    region = Region(region_of_unequal, ranks, backend, "transformer.Unequal")
    lengths_of_calls = [[2, 3, 2, 4], [5, 5, 6, 5], [7, 8, 9, 9]][dist.get_rank()]
    inputs = [torch.ones(rows, device=DEVICE) for rows in lengths_of_calls]
    right = all(torch.equal(region.call(x), region_of_unequal(x)) for x in inputs)
    ranks.agree()
    return {"right": right, "closed": region.latch.closed}


def members_only(world: int) -> dict[str, Any]:
    """Ranks 0 and 1 run a region together, the others have nothing to do with it."""
    torch.compiler.reset()
    group = dist.new_group([0, 1], backend="gloo")
    pair = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        return {"member": False}
    ranks = RankGroup(group)
    function = functools.partial(together, group=pair)
    return {"member": True} | story("transformer.Pair", function, Backend(0, compiling=1), ranks, 2)


def counted(ranks: RankGroup) -> dict[str, int]:
    """By how much the count of collectives moves at each of several."""
    torch.compiler.reset()
    x = torch.ones(4 * dist.get_world_size(), device=DEVICE)
    compiled = torch.compile(together, backend=COMPILER, dynamic=False)
    issues: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(x.clone()),
        "broadcast": lambda: dist.broadcast(x.clone(), 0),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty_like(x), x),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(x.repeat(dist.get_world_size()), x),
        "all_reduce in a graph": lambda: compiled(x),
        "nothing": lambda: x + 1,
    }
    moved = {}
    for name, issue in issues.items():
        before = ranks.issued()
        issue()
        moved[name] = ranks.issued() - before
    return moved


def main() -> None:
    global DEVICE, COMPILER
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rank", type=int)
    parser.add_argument("world", type=int)
    parser.add_argument("store")
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compiler", default=COMPILER)
    options = parser.parse_args()
    COMPILER = options.compiler
    timeout = dt.timedelta(seconds=60)
    if options.device != "cpu":
        DEVICE = torch.device(options.device, options.rank)
        torch.accelerator.set_device_index(options.rank)
    dist.init_process_group(
        options.backend, init_method=f"file://{options.store}", rank=options.rank, world_size=options.world,
        timeout=timeout,
    )  # fmt: skip
    group = dist.new_group(backend="gloo", timeout=timeout)
    ranks = RankGroup(group)
    stories: dict[str, Callable[[], Any]] = {
        "counted": lambda: counted(ranks),
        "nothing fails": lambda: story("transformer.Fine", together, Backend(-1), ranks, 3),
        "compiling fails": lambda: story("transformer.First", together, Backend(1, compiling=1), ranks, 3),
        "call 1": lambda: story("transformer.Call1", together, Backend(1, call=1), ranks, 3),
        "call 3": lambda: story("transformer.Call3", together, Backend(0, call=3), ranks, 4),
        "call 100": lambda: story("transformer.Call100", together, Backend(1, call=100), ranks, 101),
        "out of memory": lambda: story(
            "transformer.Oom", together, Backend(1, call=2, error=torch.OutOfMemoryError), ranks, 3
        ),
        "second part": lambda: story("transformer.Parts", in_two_parts, Backend(1, compiling=2), ranks, 3),
        "second part, call 4": lambda: story("transformer.Parts4", in_two_parts, Backend(0, call=4), ranks, 3),
        "unequal": lambda: unequal(ranks),
        "raised": lambda: raised(group),
        "own error of one": lambda: own_error_of_one(group),
        "midway": lambda: midway(ranks),
        "members": lambda: members_only(options.world),
    }
    started = time.perf_counter()
    told = {}
    for name, tell in stories.items():
        told[name] = tell()
        print(
            f"rank {options.rank}, {time.perf_counter() - started:.1f} s: {name}: {told[name]}",
            file=sys.stderr,
            flush=True,
        )
    print(json.dumps(told), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
