"""Whether a component computes the same thing eagerly, compiled by regions, and compiled as a whole.

The reference is the component in fp32. Families that cast to bf16 themselves are run in fp32 all the same for it: every
cast to bf16 becomes one to fp32. Weights and inputs are numbers that bf16 represents, so what differs is arithmetic.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from tools.model_families.family import Family
from tools.model_families.host import build, host
from tools.model_families.stand_in import load, recorded_log, stand_in

SIZES = (1, 2, 3)
FP32_OF_SCALE = 1e-4
BF16_OF_EAGER = 1.5

Tensors = list[torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way of compiling.

    Args:
        scope: `regional` or `full`.
        dynamic: Whether shapes are dynamic.
        backend: What compiles.
    """

    scope: str
    dynamic: bool
    backend: str


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One family, data type and way of compiling, over all sizes.

    Args:
        family: Its name.
        dtype: `fp32` or `bf16`.
        way: How it was compiled.
        distance: fp32: the largest difference from eager, of the output's scale. bf16: the distance from the fp32
            reference, of eager bf16's distance.
        limit: What `distance` may be.
        graphs: Graphs that were compiled.
        fallbacks: How many calls were answered eagerly, which would make any parity worthless.
        seconds: How long compiling and running took.
        error: What was raised, if anything, or what the log says of the first fallback.
    """

    family: str
    dtype: str
    way: Way
    distance: float
    limit: float
    graphs: int
    fallbacks: int
    seconds: float
    error: str = ""

    @property
    def holds(self) -> bool:
        """Whether the outputs agree, and are those of compiled code."""
        return self.verdict == "holds"

    @property
    def verdict(self) -> str:
        """`holds`, `FAILS`, or `not compared` where nothing was compiled that could have computed something else."""
        if self.error or self.fallbacks or self.distance > self.limit:
            return "FAILS"
        return "holds" if self.graphs else "not compared"

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "verdict": self.verdict}

    def __str__(self) -> str:
        """As one line."""
        shapes = "dynamic" if self.way.dynamic else "static"
        found = self.error or f"{self.distance:.2g} (limit {self.limit:g})"
        return (
            f"{self.family:18} {self.dtype} {self.way.scope:8} {shapes:7} {self.verdict}  {found}, "
            f"{self.graphs} graphs, {self.fallbacks} fallbacks, {self.seconds:.1f} s"
        )


class InFp32(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Every data type bf16 that an operation is told becomes fp32."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the operation in fp32."""
        named = {name: _fp32(value) for name, value in (kwargs or {}).items()}
        return func(*map(_fp32, args), **named)


def _fp32(value: Any) -> Any:
    return torch.float32 if value is torch.bfloat16 else value


def ways(backend: str, *, scopes: Iterable[str] = ("regional", "full")) -> list[Way]:
    """Every scope with static and with dynamic shapes."""
    return [Way(scope=scope, dynamic=dynamic, backend=backend) for scope in scopes for dynamic in (False, True)]


def compare(
    family: Family,
    compiled: Iterable[Way],
    *,
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16),
    sizes: tuple[int, ...] = SIZES,
) -> Iterator[Comparison]:
    """Compare a family's outputs.

    Args:
        family: Which; one that is only counted has no output, and yields nothing.
        compiled: Ways of compiling it.
        dtypes: Data types; those that the family does not run in are left out.
        sizes: Sizes to call it with, one after the other.
    """
    if family.meta:
        return
    compiled = list(compiled)
    reference = _reference(family, sizes)
    for dtype in dtypes:
        if dtype in family.dtypes:
            expected = Expected(sizes=sizes, eager=_run(family, dtype, sizes).outputs, reference=reference)
            for way in compiled:
                yield _compare(family, dtype, way, expected)


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a compiled component is compared with.

    Args:
        sizes: Sizes it was called with.
        eager: Outputs of the eager one.
        reference: Outputs in fp32.
    """

    sizes: tuple[int, ...]
    eager: Tensors
    reference: Tensors


def _compare(family: Family, dtype: torch.dtype, way: Way, expected: Expected) -> Comparison:
    started = time.monotonic()
    exact = dtype is torch.float32
    distance, error, run = float("inf"), "", Run(outputs=[])
    try:
        run = _run(family, dtype, expected.sizes, way)
    except Exception as failure:  # noqa: BLE001 - reported as the result
        error = f"{type(failure).__name__}: {next(iter(str(failure).strip().splitlines()), '')}"
    else:
        error = next(iter(run.fallbacks), "")
        trios = zip(run.outputs, expected.eager, expected.reference, strict=True)
        distance = max(_of_scale(c, e) if exact else _of_eager(c, e, r) for c, e, r in trios)
    return Comparison(
        family=family.name,
        dtype="fp32" if exact else "bf16",
        way=way,
        distance=distance,
        limit=FP32_OF_SCALE if exact else BF16_OF_EAGER,
        graphs=run.graphs,
        fallbacks=len(run.fallbacks),
        seconds=time.monotonic() - started,
        error=error,
    )


def _of_scale(compiled: torch.Tensor, eager: torch.Tensor) -> float:
    return float((compiled - eager).abs().max() / eager.abs().max())


def _of_eager(compiled: torch.Tensor, eager: torch.Tensor, reference: torch.Tensor) -> float:
    return float((compiled - reference).norm() / (eager - reference).norm())


@dataclass(frozen=True, kw_only=True)
class Run:
    """What came out of one run.

    Args:
        outputs: In fp32, of all sizes.
        graphs: Graphs that were compiled.
        fallbacks: What the log says of calls that were answered eagerly.
    """

    outputs: Tensors
    graphs: int = 0
    fallbacks: tuple[str, ...] = ()


def _reference(family: Family, sizes: tuple[int, ...]) -> Tensors:
    mode = None if torch.float32 in family.dtypes else InFp32()  # type: ignore[no-untyped-call]
    return _run(family, torch.float32, sizes, mode=mode).outputs


def _run(
    family: Family,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    way: Way | None = None,
    *,
    mode: TorchDispatchMode | None = None,
) -> Run:
    """Call a fresh component with every size."""
    torch.compiler.reset()
    counters.clear()
    with host(dtype, family.config, family.pipeline) as od_config, torch.no_grad():
        component = build(family, od_config)
        if mode is not None:
            component.float()
        if way is not None:
            _compile(family, component, od_config, way)
        # All inputs at once, so that none is at an address that a cache of the model's remembers another one at.
        inputs = [family.inputs(size, dtype) for size in sizes]
        with mode or nullcontext(), recorded_log() as log:
            outputs = [tensor for each in inputs for tensor in tensors(family.call(component, each))]
    return Run(
        outputs=[tensor.float() for tensor in outputs],
        graphs=counters["stats"]["unique_graphs"],
        fallbacks=tuple(line for line in log.lines if "compiled call failed" in line),
    )


def _compile(family: Family, component: torch.nn.Module, od_config: Any, way: Way) -> None:
    with mock.patch.object(torch, "compile", functools.partial(torch.compile, backend=way.backend)):
        load(stand_in(family, component), od_config, granularity=way.scope, dynamic=way.dynamic)


def tensors(output: Any) -> Iterator[torch.Tensor]:
    """Every floating or integer tensor in what a component returned, in order."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from tensors(value)
    elif hasattr(output, "__dict__"):
        yield from tensors(vars(output))
