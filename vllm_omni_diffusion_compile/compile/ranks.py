"""Fallback where several ranks run a region together: one decision for all of them, and none of them left waiting.

A rank that runs a region eagerly issues the same collectives as one that runs it compiled, in the same order. What must
not happen is that it issues one twice: the others would wait for it for ever. So a failure is handled where nothing was
communicated since: at the graph that failed, which this rank runs as it was captured (`GuardedBackend`), or at the
whole region, if no collective was issued in it yet. Where neither holds the request fails, and the error names the
rank. Before the next request all ranks agree (`RankGroup.run`), and what failed on one is eager on all from then on.

A failure that is to be raised is handled in the same way, so that nobody is left waiting: the ranks finish the request,
agree after it, too, and all of them raise.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch._dynamo.exc import RestartAnalysis

from vllm_omni_diffusion_compile.compile.latch import Latch, without_frames
from vllm_omni_diffusion_compile.errors import RankFailedError

# Process groups of these count what was issued on them; another one's counter raises.
# Source: torch/csrc/distributed/c10d/ProcessGroup.hpp, `getSequenceNumberForGroup`.
_COUNTING = frozenset({"gloo", "nccl", "ucc", "xccl"})
# Operators that surely send nothing; any other one may belong to a communicator.
_SILENT = ("aten.", "prim.", "prims.", "prims::", "aten::")


class RankGroup:
    """The ranks that run the same regions in lockstep.

    Args:
        group: A process group of exactly these ranks, for small tensors on the CPU (gloo). Nobody else uses it.
        counted: Whether all that the ranks send each other is collectives of torch's process groups. vLLM's own
            communicators (tensor parallelism) are none, and what ring attention sends from rank to rank NCCL counts
            apart.
        fails_closed: Whether a failure on one rank fails the request on all, and those after it.
    """

    def __init__(self, group: dist.ProcessGroup, *, counted: bool = True, fails_closed: bool = False) -> None:
        self._group = group
        self._fails_closed = fails_closed
        self._counted = counted
        self._latches: dict[str, Latch] = {}
        self._told: set[str] = set()
        self._groups: tuple[int, list[Any]] = (-1, [])  # torch's stubs lack the method that is called of a group
        self.rank = dist.get_rank()
        self.graphs_run = 0

    def watch(self, latch: Latch) -> None:
        """Have a latch closed on every rank once it is closed on one."""
        self._latches[latch.name] = latch

    def issued(self) -> int:
        """Count the collectives that this rank has issued, on every process group of more than one rank.

        Source: `ProcessGroup._get_sequence_number_for_group`, which gloo and NCCL count up at each.
        """
        known = dist.distributed_c10d._world.pg_map  # noqa: SLF001 - torch lists its groups nowhere else
        if len(known) != self._groups[0]:
            groups = [group for group in known if group.size() > 1 and group is not self._group]
            counting = [group for group in groups if dist.get_backend(group) in _COUNTING]
            self._groups = len(known), counting
            self._counted = self._counted and len(counting) == len(groups)
        return sum(group._get_sequence_number_for_group() for group in self._groups[1])  # noqa: SLF001 - as above

    def sent(self) -> tuple[int, int]:
        """Return how far this rank is: collectives issued, guarded graphs run. Read before a call."""
        return self.issued(), self.graphs_run

    def may_have_communicated(self, sent: tuple[int, int], *, first_frame: bool = False) -> bool:
        """Whether this rank may have sent something since.

        Args:
            sent: What `sent` returned then.
            first_frame: Whether torch has looked at one frame since, the first one of the call that failed: unless a
                graph of it ran, nothing did.
        """
        issued, graphs_run = sent
        if first_frame and self.graphs_run == graphs_run:
            return False
        return self.issued() != issued or not self._counted

    def failed_midway(self, latch: Latch, error: Exception) -> RankFailedError:
        """Return what is raised for a region that failed on this rank after it may have communicated."""
        return RankFailedError(self.rank, latch.name, f"{type(error).__name__}: {error}")

    def run(self, request: Callable[[], Any]) -> Any:
        """Run a request, or a step of one, which all ranks do at the same time; they agree before it.

        Raises:
            RankFailedError: A region has failed on some rank, and that is to be raised; on all ranks.
        """
        self.agree()
        if not self._fails_closed:
            return request()
        self._raise_what_failed()
        try:
            result = request()
        except RankFailedError:  # the others do not come to agree: they wait for what this rank did not send
            raise
        except Exception:  # the request's own error, which the others may not have met
            self.agree()
            raise
        self.agree()
        self._raise_what_failed()
        return result

    def agree(self) -> None:
        """Close on this rank what is closed on any other; a collective, called by all ranks between two requests.

        As long as nothing has failed it costs one reduction of a single number.
        """
        news = [
            (name, latch.failure.error_type, latch.failure.reason)
            for name, latch in self._latches.items()
            if latch.failure is not None and name not in self._told
        ]
        anything = torch.tensor([len(news)], dtype=torch.int64)
        dist.all_reduce(anything, op=dist.ReduceOp.MAX, group=self._group)
        if not anything.item():
            return
        told: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(told, (self.rank, news), group=self._group)
        for rank, failures in told:
            for name, error_type, reason in failures:
                self._told.add(name)
                if name in self._latches:
                    self._latches[name].close_for(rank, error_type, reason)

    def _raise_what_failed(self) -> None:
        for latch in self._latches.values():
            if (failure := latch.failure) is not None:
                rank = self.rank if failure.rank is None else failure.rank
                error = f"{failure.error_type}: {failure.reason}"
                raise RankFailedError(rank, latch.name, error, communicated=False) from failure.error


class GuardedBackend:
    """A backend for torch.compile whose graphs fall back one by one.

    Args:
        compile_graph: The backend itself: `(graph module, example inputs) -> callable`.
        ranks: The ranks that run the region.
        latch: Closed when a graph failed, once it gave a result as it was captured.
    """

    def __init__(self, compile_graph: Callable[..., Callable[..., Any]], ranks: RankGroup, latch: Latch) -> None:
        self._compile_graph = compile_graph
        self._ranks = ranks
        self._latch = latch

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        """Compile a graph; if that fails, return the graph as it was captured."""
        # A backend rewrites the graph that it is given.
        captured = fx.GraphModule(graph, copy.deepcopy(graph.graph))
        try:
            compiled = self._compile_graph(graph, inputs, **options)
        except RestartAnalysis:  # no failure: Dynamo is asked to trace once more, with a number as a constant
            raise
        except Exception as error:  # noqa: BLE001 - what Dynamo captured can be run, whatever its backend raised
            return _UncompiledGraph(captured, without_frames(error), self._latch)
        return _GuardedGraph(captured, compiled, self._ranks, self._latch)


def graph_compiler(backend: str | Callable[..., Any], mode: str | None) -> Callable[..., Callable[..., Any]]:
    """Return what compiles one graph, as torch.compile would with these options.

    Args:
        backend: A name that torch knows, or the backend itself.
        mode: Inductor's; None for its default.
    """
    from torch._dynamo import lookup_backend
    from torch._inductor import list_mode_options

    compile_graph: Callable[..., Callable[..., Any]] = lookup_backend(backend) if isinstance(backend, str) else backend
    if mode is None:
        return compile_graph
    return functools.partial(compile_graph, config_patches=list_mode_options(mode))


class _UncompiledGraph:
    """A graph that failed to compile. It runs as it was captured; if that fails too, the error is the call's own."""

    def __init__(self, captured: fx.GraphModule, failure: Exception, latch: Latch) -> None:
        self._captured = captured
        self._failure = failure
        self._latch = latch

    def __call__(self, *args: Any) -> Any:
        result = self._captured(*args)
        self._latch.close(self._failure)
        return result


class _GuardedGraph:
    """A compiled graph that runs as it was captured after its first failure."""

    def __init__(self, captured: fx.GraphModule, compiled: Callable[..., Any], ranks: RankGroup, latch: Latch) -> None:
        self._captured = captured
        self._compiled: Callable[..., Any] | None = compiled
        self._ranks = ranks
        self._latch = latch
        self._may_communicate = _may_communicate(captured)

    def __call__(self, *args: Any) -> Any:
        compiled = self._compiled
        if compiled is None:
            return self._captured(*args)
        before = self._ranks.sent()
        self._ranks.graphs_run += 1
        try:
            return compiled(*args)
        except self._latch.passes_through:
            raise
        except Exception as error:
            if self._may_communicate and self._ranks.may_have_communicated(before):
                raise self._ranks.failed_midway(self._latch, error) from error
            failure = without_frames(error)
        result = self._captured(*args)
        self._compiled = None
        self._latch.close(failure)
        return result


def _may_communicate(graph: fx.GraphModule) -> bool:
    """Whether a graph has an operator that is neither torch's arithmetic nor Python's."""
    for node in graph.graph.nodes:
        custom = isinstance(node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))  # noqa: SLF001
        if custom and not str(node.target).startswith(_SILENT):
            return True
        if "distributed" in str(getattr(node.target, "__module__", "")):
            return True
    return False
