"""Whether vLLM and vLLM-Omni load this package, and which other plugins they load beside it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points

from vllm_omni_diffusion_compile.doctor.finding import Finding

_COMPILE, _CPU = "diffusion_compile", "diffusion_cpu"
_GENERAL = ("vllm.general_plugins", "vllm_omni.general_plugins")
_PLATFORMS = "vllm_omni.platform_plugins"
_VARIABLE = "VLLM_PLUGINS"
# vLLM-Omni's own general plugin: its models, without which nothing is served.
_MODELS = "vllm_omni_register_models"


def allowed() -> frozenset[str] | None:
    """Return the plugins that may be loaded, or None for all.

    Source: `VLLM_PLUGINS` in `vllm.envs`, which takes seconds to import.
    """
    said = os.environ.get(_VARIABLE)
    return None if said is None else frozenset(said.split(","))


def is_loaded() -> bool:
    """Whether vLLM finds the plugin of the compile features and may load it."""
    names = allowed()
    return any(entry.name == _COMPILE for entry in _found(_GENERAL[0])) and (names is None or _COMPILE in names)


def check_plugins(*, accelerator: bool) -> Iterator[Finding]:
    """Check the entry points and what `VLLM_PLUGINS` leaves of them.

    Args:
        accelerator: There is one, so that the CPU platform is not needed.
    """
    names = allowed()
    general = _found(_GENERAL[0])
    if not any(entry.name == _COMPILE for entry in general):
        yield Finding.broken(
            _COMPILE,
            f"not among the installed plugins ({_GENERAL[0]})",
            "install the package (pip install .): a folder on PYTHONPATH alone is no plugin",
        )
    elif names is not None and _COMPILE not in names:
        yield Finding.broken(
            _COMPILE,
            f"filtered out: {_VARIABLE} is {os.environ[_VARIABLE]!r}; the server runs as if this package were "
            "not installed",
            f"{_VARIABLE}={','.join(sorted(_wanted(names, accelerator)))}, or unset it to load every plugin",
        )
    else:
        yield Finding.ok(_COMPILE, "loaded in every process of vLLM")
    yield from _cpu_platform(names, accelerator=accelerator)
    others = sorted({entry.name for entry in general} - {_COMPILE, _MODELS})
    loaded = [name for name in others if names is None or name in names]
    yield Finding.ok("other general plugins", ", ".join(loaded) or "none")


def _cpu_platform(names: frozenset[str] | None, *, accelerator: bool) -> Iterator[Finding]:
    if accelerator or any(name == _CPU and (names is None or name in names) for name in _names(_PLATFORMS)):
        return
    yield Finding.broken(
        _CPU,
        "filtered out or not installed, and there is no accelerator",
        f"add {_CPU} to {_VARIABLE}, or unset it: vLLM-Omni has no platform of its own for CPU",
    )


def _wanted(names: frozenset[str], accelerator: bool) -> set[str]:
    """Add to what is named all that a server needs here, so that the line can be pasted."""
    platform = () if accelerator or _CPU not in _names(_PLATFORMS) else (_CPU,)
    models = {name for group in _GENERAL for name in _names(group)} & {_MODELS}
    return {*names, _COMPILE, *platform, *models} - {""}


def _names(group: str) -> set[str]:
    return {entry.name for entry in _found(group)}


def _found(group: str) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=group))
