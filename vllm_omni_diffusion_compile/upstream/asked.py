"""Whether attention is computed by the backend that a configuration names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

_SDPA = "scaled_dot_product"
# Operators and kernels that a call of SDPA leaves in a profile, on CUDA too.
_OF_SDPA = re.compile(r"aten::|(void )?(pytorch_flash|fmha_cutlass)|.*cudnn", re.IGNORECASE)
_FLASH = ("FLASH_ATTN", "FLASH_ATTN_HUB", "FLASH_ATTN_3_HUB")


def not_as_asked(layers: Iterable[Any], attention: Any, operators: Mapping[str, int]) -> list[str]:
    """Say where another backend computes attention than the one that is named; nothing where none is named.

    Layers tell what they were given: some platforms take another backend for one that they cannot run, and only log
    it. Operators tell that none of the named kind ran, as when a layer falls back to SDPA for fp32. What neither tells:
    a layer of the right class that falls back in some of its calls, or on one of several ranks only, and whether an
    operator was called by one of these layers or by the model itself.

    Args:
        layers: vLLM-Omni's attention layers of the loaded model.
        attention: `diffusion_attention_config` as vLLM-Omni has read it, or None.
        operators: What ran, by name.
    """
    from vllm_omni.diffusion.attention.backends.registry import DiffusionAttentionBackendEnum

    named: dict[str, None] = {}
    others: Counter[tuple[str, str, str]] = Counter()
    for layer in layers:
        if attention is None or layer.attn_backend is None:  # the model's own kernel, which no configuration names
            continue
        spec, _ = attention.resolve_with_source(role=layer.role, role_category=getattr(layer, "role_category", None))
        if spec is None:
            continue
        name = spec.backend.upper()
        named[name] = None
        if not isinstance(layer.attention, DiffusionAttentionBackendEnum[name].get_class().get_impl_cls()):
            others[name, layer.role, type(layer.attention).__name__] += 1
    said = [
        f"{name} was asked for, and {count} attention layer(s) of the role {role!r} have {found}"
        for (name, role, found), count in others.items()
    ]
    for name in named:
        ran = ", ".join(operators)
        if name == "TORCH_SDPA" and operators and not any(_SDPA in operator for operator in operators):
            said.append(f"{name} was asked for, and no {_SDPA} operator ran, but {ran}")
        sdpa = [operator for operator in operators if _OF_SDPA.match(operator)]
        if name in _FLASH and any(_SDPA in operator for operator in sdpa) and len(sdpa) == len(operators):
            said.append(f"{name} was asked for, and only {ran} ran")
    return said
