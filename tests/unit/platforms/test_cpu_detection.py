"""The CPU platform answers only where nothing else can."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("vllm", reason="the platform is a plugin of vLLM")

from vllm_omni_diffusion_compile.platforms.cpu_detection import active_platforms


def _absent() -> None:
    return None


def _present() -> str:
    return "some.Platform"


def _broken() -> str:
    raise RuntimeError("the driver does not answer")


def test_no_accelerator_leaves_the_machine_to_cpu() -> None:
    assert active_platforms({"cuda": _absent, "npu": _absent}) == []


def test_every_accelerator_found_is_named() -> None:
    assert active_platforms({"cuda": _present, "rocm": _absent, "npu": _present}) == ["cuda", "npu"]


def test_a_detector_that_fails_has_found_nothing() -> None:
    assert active_platforms({"xpu": _broken, "musa": _present}) == ["musa"]


def _ask(prepare: str) -> str:
    """Ask the entry point in a fresh interpreter, where no platform has been resolved yet."""
    code = f"{prepare}\nfrom vllm_omni_diffusion_compile.platforms import cpu_platform\nprint('answer', cpu_platform())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return next(line.partition(" ")[2] for line in result.stdout.splitlines() if line.startswith("answer "))


def test_the_entry_point_names_a_class_where_vllm_runs_on_cpu() -> None:
    pytest.importorskip("vllm_omni")
    path = "vllm_omni_diffusion_compile.platforms.cpu.CpuOmniPlatform"
    assert _ask("") == path


def test_the_entry_point_steps_back_from_an_accelerator() -> None:
    pytest.importorskip("vllm_omni")
    prepare = "import vllm_omni.platforms as p; p.builtin_omni_platform_plugins['npu'] = lambda: 'some.Platform'"
    assert _ask(prepare) == "None"


def test_the_entry_point_steps_back_where_vllm_does_not_run_on_cpu() -> None:
    prepare = (
        "import vllm.platforms as p\n"
        "from vllm.platforms.interface import UnspecifiedPlatform\n"
        "p._current_platform = UnspecifiedPlatform()"
    )
    assert _ask(prepare) == "None"


def test_the_package_of_platforms_imports_nothing_of_the_host() -> None:
    code = (
        "import sys, vllm_omni_diffusion_compile.platforms\n"
        "print([name for name in sys.modules if name.partition('.')[0] in ('torch', 'vllm', 'vllm_omni')])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
