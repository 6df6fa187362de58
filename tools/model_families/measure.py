"""Stock against ours, one family at a time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from tools.model_families.facts import Call, Compilations, Modules, Outcome, modules_of, outcome, repeated_blocks
from tools.model_families.family import Family
from tools.model_families.host import build, host
from tools.model_families.stand_in import load, recorded_log, stand_in


@dataclass(frozen=True, kw_only=True)
class Row:
    """One family under both runners.

    Args:
        family: Which.
        blocks: Repeated blocks, by class.
        components: What the pipeline declares to the runner; empty if nothing.
        stock: vLLM-Omni alone.
        ours: With this package.
    """

    family: Family
    blocks: dict[str, int]
    components: tuple[str, ...]
    stock: Outcome
    ours: Outcome

    @property
    def faults(self) -> list[str]:
        """What ours may not do: claim what did not happen, or leave a family out in silence, or fail."""
        faults = [f"false: {claim.line}" for claim in self.ours.claims if claim.verdict == "false"]
        if self.ours.silent:
            faults.append("left out in silence")
        if self.ours.raised:
            faults.append(f"raised {self.ours.raised}")
        return faults

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "family": self.family.name,
            "pipeline": self.family.pipeline,
            "path": self.family.path,
            "components": self.components,
            "blocks": self.blocks,
            "stock": self.stock.to_json(),
            "ours": self.ours.to_json(),
            "limits": self.family.limits,
            "faults": self.faults,
        }


def measure(family: Family, *, granularity: str = "regional", dynamic: bool = True) -> Row:
    """Set a family up and call it once, without this package and with it.

    Args:
        family: Which.
        granularity: `regional` or `full`.
        dynamic: `diffusion_compile_dynamic`.
    """
    from vllm_omni_diffusion_compile.upstream import activation

    outcomes: dict[str, Outcome] = {}
    blocks: dict[str, int] = {}
    components: tuple[str, ...] = ()
    for arm in ("stock", "ours"):
        activation.deactivate()
        if arm == "ours":
            activation.activate()
        try:
            components, modules, outcomes[arm] = _one(family, granularity, dynamic)
        finally:
            activation.deactivate()
        blocks = dict(Counter(type(block).__name__ for block in repeated_blocks(modules).values()))
    return Row(family=family, blocks=blocks, components=components, stock=outcomes["stock"], ours=outcomes["ours"])


def _one(family: Family, granularity: str, dynamic: bool) -> tuple[tuple[str, ...], Modules, Outcome]:
    torch.compiler.reset()
    dtype = family.dtypes[0]
    with host(dtype, family.config, family.pipeline) as od_config, torch.no_grad():
        component = build(family, od_config)
        pipeline = stand_in(family, component)
        watch = Compilations()
        with watch.watching():
            _, lines = load(pipeline, od_config, granularity=granularity, dynamic=dynamic)
        raised = None
        with recorded_log() as log:
            if not family.meta:
                try:
                    family.call(component, family.inputs(1, dtype))
                except Exception as error:  # noqa: BLE001 - it is a result: stock has no fallback
                    raised = error
        modules = modules_of(pipeline, family.path, component)
        declared = tuple(getattr(pipeline, "_dit_modules", ()))
        return (
            declared,
            modules,
            outcome(modules, watch, lines, Call(made=not family.meta, raised=raised, lines=log.lines)),
        )
