"""What is compiled of a pipeline, by what its modules do when they are called, and which log lines say so rightly."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal
from unittest import mock

import torch

_CLAIM = re.compile(r"Model runner: (?P<path>[\w.]+) configured for lazy (?P<scope>regional|full) torch\.compile")
# Words with which a line owns up to something that is not compiled.
_SAID = re.compile(r"not compiled|skip|no blocks|nothing (is|to) compile|stays eager|setup_compile", re.IGNORECASE)
# Words of a line that says of something that its compiled code failed, and that it is eager from then on.
_FELL_BACK = "compiled call failed"

Modules = Mapping[str, torch.nn.Module]
Verdict = Literal["true", "false", "conditional"]


def modules_of(pipeline: torch.nn.Module, path: str, component: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Every module of a stand-in pipeline by its path, those that it holds in parts that are no modules included."""
    modules = dict(pipeline.named_modules())
    if not any(module is component for module in modules.values()):
        modules.update(component.named_modules(prefix=path))
    return modules


def repeated_blocks(modules: Modules) -> dict[str, torch.nn.Module]:
    """The outermost modules that stand in a `ModuleList` with another of their class, by their path.

    This is structure alone: neither what a model declares nor what our package infers. Modules without submodules
    (a list of linear layers) are no blocks.
    """
    blocks: dict[str, torch.nn.Module] = {}
    for name, module in modules.items():
        if not isinstance(module, torch.nn.ModuleList) or any(name.startswith(f"{path}.") for path in blocks):
            continue
        classes = Counter(type(child) for child in module)
        for index, child in enumerate(module):
            if classes[type(child)] > 1 and next(child.children(), None) is not None:
                blocks[f"{name}.{index}"] = child
    return blocks


class Compilations:
    """Stands between the host and torch.compile: who was compiled, who was called, and where graphs were captured.

    Graphs run as they were captured, so that a table over all families takes minutes and not hours.
    """

    def __init__(self, backend: str | None = None) -> None:
        self.compiled: dict[int, Any] = {}
        self.called: Counter[int] = Counter()
        self.graphs: Counter[str] = Counter()
        self._backend = backend
        self._stack: list[Any] = []
        self._compile = torch.compile

    def __call__(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Compile like torch.compile, and watch."""
        owner = getattr(function, "__self__", function)
        options["backend"] = self._backend or self._capture
        options.pop("mode", None)
        compiled = self._compile(function, **options)
        self.compiled[id(owner)] = owner

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.called[id(owner)] += 1
            self._stack.append(owner)
            try:
                return compiled(*args, **kwargs)
            finally:
                self._stack.pop()

        return watched

    def _capture(self, graph: Any, _: Any) -> Any:
        self.graphs[type(self._stack[-1]).__name__ if self._stack else "?"] += 1
        return graph.forward

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Take the place of torch.compile."""
        with mock.patch.object(torch, "compile", self):
            yield


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One line that says a component was set up for compiling.

    Args:
        line: As logged.
        verdict: `true` if modules of that component are compiled and at least one of each class was called;
            `conditional` if modules are set up, but a class of them was not called, which "lazy" leaves open; else
            `false`. The same for whoever logged it, whatever else the line says.
    """

    line: str
    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one family under one runner.

    Args:
        blocks: Repeated blocks of which at least a part is compiled, and was called if the model was run.
        modules: Modules with a compiled forward, by class.
        share: Parameters inside of those that were called, of all.
        idle: Modules with a compiled forward that the model never calls when it runs; they count for no blocks.
        ran: Whether the model was run (a family that is only counted is not).
        claims: Lines that say a component was set up.
        silent: Blocks are left eager and no line says so.
        raised: What the call raised, if it did: a user's request would have got that.
        fallbacks: Lines that say of something that it failed to compile and is eager from then on.
    """

    blocks: int
    modules: dict[str, int]
    share: float
    idle: int
    ran: bool
    claims: list[Claim] = field(default_factory=list)
    silent: bool = False
    raised: str = ""
    fallbacks: list[str] = field(default_factory=list)

    @property
    def log(self) -> str:
        """The worst of the verdicts, or `none` where nothing is claimed."""
        verdicts = {claim.verdict for claim in self.claims}
        return next((worst for worst in ("false", "conditional", "true") if worst in verdicts), "none")

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "log": self.log}


@dataclass(frozen=True, kw_only=True)
class Call:
    """What became of the call of a model.

    Args:
        made: Whether it was called at all.
        raised: What it raised.
        lines: What was logged meanwhile.
    """

    made: bool
    raised: Exception | None = None
    lines: Sequence[str] = ()


def outcome(modules: Modules, watch: Compilations, lines: list[str], call: Call) -> Outcome:
    """Judge one pipeline after it was set up and called.

    Args:
        modules: The stand-in's, by path.
        watch: What took torch.compile's place.
        lines: What was logged while it was set up.
        call: What became of its call since.
    """
    # By id, since one module may have several paths.
    compiled = {id(module) for module in modules.values() if id(module) in watch.compiled and _replaced(module)}
    idle = {identity for identity in compiled if call.made and not watch.called[identity]}
    working = compiled - idle
    inside = {id(part) for module in modules.values() if id(module) in working for part in module.modules()}
    blocks = repeated_blocks(modules).values()
    reached = [block for block in blocks if id(block) in inside or any(id(part) in working for part in block.modules())]
    sizes = {id(module): sum(p.numel() for p in module.parameters(recurse=False)) for module in modules.values()}
    claims = []
    for line in lines:
        if match := _CLAIM.search(line):
            path = match["path"]
            within = {id(part) for name, part in modules.items() if name == path or name.startswith(f"{path}.")}
            unused = _classes(watch, within & compiled) - _classes(watch, within & working)
            verdict: Verdict = "false"
            if within & working and not unused:
                verdict = "true"
            elif within & compiled:
                verdict = "conditional"
            claims.append(Claim(line=line, verdict=verdict))
    return Outcome(
        blocks=len(reached),
        modules=dict(Counter(type(watch.compiled[identity]).__name__ for identity in compiled)),
        share=sum(sizes[identity] for identity in inside) / max(1, sum(sizes.values())),
        idle=len(idle),
        ran=call.made,
        claims=claims,
        silent=bool(blocks) and not compiled and not any(_SAID.search(line) for line in lines),
        raised=""
        if call.raised is None
        else f"{type(call.raised).__name__}: {next(iter(str(call.raised).splitlines()), '')}",
        fallbacks=[line for line in call.lines if _FELL_BACK in line],
    )


def _classes(watch: Compilations, modules: set[int]) -> set[str]:
    return {type(watch.compiled[identity]).__name__ for identity in modules}


def _replaced(module: torch.nn.Module) -> bool:
    """Whether a call of the module reaches something else than its class's own forward."""
    own = vars(module)
    return (
        any(name in own for name in ("forward", "_omni_original_forward")) or own.get("_compiled_call_impl") is not None
    )
