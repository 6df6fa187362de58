"""Rows for the checks to look at; nothing is grafted."""

from __future__ import annotations

from typing import Any

from vllm_omni_diffusion_compile.upstream.dataclass_field import NewField
from vllm_omni_diffusion_compile.upstream.graft import FieldGraft, Graft

LINK = "https://github.com/vllm-project/vllm-omni/pull/1"


def unchanged(value: Any) -> Any:
    return value


def row(target: str = "vllm_omni.diffusion.data:normalize", **changes: Any) -> Graft:
    good: dict[str, Any] = {
        "make": unchanged,
        "why": "The release drops a name in silence.",
        "upstream": LINK,
        "remove_when": "the release refuses the name",
    }
    return Graft(target=target, **(good | changes))


def field_row(target: str = "vllm_omni.diffusion.data:Config", name: str = "limit") -> FieldGraft:
    return FieldGraft(
        target=target,
        make=unchanged,
        field=NewField(name=name, annotation=int, default=1, after="size"),
        why="The setting has to reach the worker.",
        upstream=LINK,
        remove_when="the release has the field",
    )
