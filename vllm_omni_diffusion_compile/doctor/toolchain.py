"""What inductor compiles with."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from vllm_omni_diffusion_compile.compile.cpp import why_not
from vllm_omni_diffusion_compile.doctor.finding import Finding
from vllm_omni_diffusion_compile.doctor.versions import is_there, release_of

# Each of them makes torch.compile return what it was given. Source: torch/_dynamo/config.py.
_SWITCHES = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")


def check_toolchain(*, fails_closed: bool = False) -> Iterator[Finding]:
    """Check torch, inductor, a C++ compiler and Triton.

    Args:
        fails_closed: `on_failure` is `raise`: a server does not survive a compiler that fails.
    """
    if not is_there("torch"):
        yield Finding.broken("torch", "not installed", "install the torch that vLLM wants; pip install vllm brings it")
        return
    yield _torch()
    yield _compiler(fails_closed=fails_closed)
    yield _triton(fails_closed=fails_closed)


def _torch() -> Finding:
    switched_off = [name for name in _SWITCHES if os.environ.get(name, "0") not in ("", "0")]
    if switched_off:
        return Finding.limit(
            "torch.compile",
            f"{', '.join(switched_off)} is set: torch compiles nothing, whatever the settings say",
            f"unset {' and '.join(switched_off)}; to serve eagerly, --enforce-eager also saves the warmup",
        )
    try:
        import torch
        import torch._inductor.compile_fx
    except Exception as error:  # noqa: BLE001 - a damaged installation may raise anything, and that is what is reported
        return Finding.broken(
            "torch.compile",
            f"importing inductor fails ({type(error).__name__}: {error})",
            "install torch again, in the build that vLLM wants",
        )
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return Finding.ok("torch.compile", f"torch {torch.__version__}, device {device or 'cpu'}")


def _compiler(*, fails_closed: bool) -> Finding:
    """Have the compiler that inductor would take compile a line."""
    name, judged = "C++ compiler", _judge(fails_closed=fails_closed)
    remedy = (
        "install g++ or clang++ with OpenMP and the headers of this Python (python3-dev), or name a compiler that "
        f"works in CXX; until then {'the first compilation ends the start' if fails_closed else 'all runs eagerly'}"
    )
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler

        compiler = get_cpp_compiler()
    except Exception as error:  # noqa: BLE001 - what torch raises here has changed from release to release
        said = f" (CXX is {os.environ['CXX']!r})" if "CXX" in os.environ else ""
        reason = str(error).strip().partition("\n")[0]
        return judged(name, f"inductor finds none{said}: {reason}", remedy)
    problem = why_not(compiler)
    if problem:
        return judged(name, f"{compiler} does not compile a line: {problem}", remedy)
    return Finding.ok(name, f"{compiler} compiles")


def _triton(*, fails_closed: bool) -> Finding:
    import torch

    if not torch.cuda.is_available():
        return Finding.ok("Triton", "not needed: no GPU that inductor compiles for with Triton")
    if not is_there("triton"):
        judged = _judge(fails_closed=fails_closed)
        remedy = "install the Triton that torch wants; pip install torch brings it"
        return judged("Triton", "not installed, and inductor needs it on a GPU", remedy)
    return Finding.ok("Triton", release_of("triton") or "installed")


def _judge(*, fails_closed: bool) -> Callable[[str, str, str], Finding]:
    return Finding.broken if fails_closed else Finding.limit
