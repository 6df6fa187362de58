"""The platform that vLLM-Omni takes this machine for, and which attention backends it can use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_omni_diffusion_compile.doctor.finding import Finding

# Of most models that vLLM-Omni serves.
_HEAD_SIZE = 128
_SELECTED, _SELECTABLE, _NOT_HERE = "selected", "can be selected", "not on this machine"


def check_platform(*, needs_inductor: bool = True) -> Iterator[Finding]:
    """Check the platform, and whether something is compiled on it.

    Args:
        needs_inductor: The key `backend` names none that does without.
    """
    platform = _platform()
    name = type(platform).__name__
    if platform.is_unspecified():
        yield Finding.broken(
            "platform",
            "vLLM-Omni finds no platform for this machine",
            "install the driver of the accelerator, or, to serve on CPU, leave diffusion_cpu in VLLM_PLUGINS",
        )
    elif needs_inductor and not platform.supports_torch_inductor():
        yield Finding.limit(
            "platform",
            f"{name}, which does not support inductor: nothing is compiled",
            "name a backend that the platform brings (diffusion_compile_config.backend), or serve eagerly",
        )
    else:
        yield Finding.ok("platform", name)


def check_backends(selected: frozenset[str] = frozenset()) -> Iterator[Finding]:
    """Check every attention backend that the release knows.

    Args:
        selected: Those that the command line or the YAML selects: it is broken if one of them does not run.
    """
    from vllm_omni.diffusion.attention.backends.registry import DiffusionAttentionBackendEnum

    platform = _platform()
    default = _reason_against(platform, None)
    yield (
        Finding.ok("default", str(_path(platform, None)).rpartition(".")[2])
        if default is None
        else Finding.broken("default", default, "install one of the backends that are named there")
    )
    for backend in DiffusionAttentionBackendEnum.__members__:
        reason = _reason_against(platform, backend)
        if reason is None:
            yield Finding.ok(backend, _SELECTED if backend in selected else _SELECTABLE)
        elif backend in selected:
            yield Finding.broken(
                backend,
                f"selected, and does not run here: {reason}",
                "select one of those that can be, or leave the option out",
            )
        else:
            yield Finding.ok(backend, f"{_NOT_HERE}: {reason}", group=_NOT_HERE)


def device_type() -> str:
    """Return the type of the device that a worker computes on: `cuda`, `cpu`, `npu`."""
    return str(_platform().device_type)


def _platform() -> Any:
    from vllm_omni.platforms import current_omni_platform

    return current_omni_platform


def _path(platform: Any, backend: str | None) -> str:
    return str(platform.get_diffusion_attn_backend_cls(selected_backend=backend, head_size=_HEAD_SIZE))


def _reason_against(platform: Any, backend: str | None) -> str | None:
    """Return why the platform refuses a backend, in its own words, or None."""
    try:
        _path(platform, backend)
    except Exception as error:  # noqa: BLE001 - kernels' packages raise whatever they like when they are imported
        return str(error).strip().partition("\n")[0] or type(error).__name__
    return None
