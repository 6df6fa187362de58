"""MindIE-SD: not there, there without tail protection, and there with a kernel that takes our order.

The packages are stand-ins: no NPU has run them. What they have and lack is what MindIE-SD 3.1.0 has.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vllm_omni_diffusion_compile.doctor import Finding
from vllm_omni_diffusion_compile.doctor.rainfusion import check_rainfusion

KERNEL = "def rain_fusion_attention(query, key, value, **options): ...\n"
A5 = KERNEL + "def is_a5_device():\n    return True\n"

Install = Callable[[str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a stand-in for MindIE-SD 3.1.0 on the path, whose kernel's module has the given code."""

    def put(code: str) -> None:
        module = tmp_path / "mindiesd" / "layers" / "flash_attn" / "sparse_flash_attn_rf_v2.py"
        module.parent.mkdir(parents=True)
        module.write_text(code)
        (tmp_path / "mindiesd" / "__init__.py").write_text("def sparse_attention(*args, **options): ...\n")
        (tmp_path / "mindiesd-3.1.0.dist-info").mkdir()
        (tmp_path / "mindiesd-3.1.0.dist-info" / "METADATA").write_text("Name: mindiesd\nVersion: 3.1.0\n")
        monkeypatch.syspath_prepend(tmp_path)

    yield put
    for name in [name for name in sys.modules if name.partition(".")[0] == "mindiesd"]:
        del sys.modules[name]


def by_name(device: str, executor: str = "auto", *, selected: bool = False) -> dict[str, Finding]:
    return {finding.name: finding for finding in check_rainfusion(device, executor=executor, selected=selected)}


@pytest.mark.parametrize(("selected", "state"), [(False, "limit"), (True, "broken")])
def test_missing_mindie_is_named_on_npu(selected: bool, state: str) -> None:
    found = by_name("npu", selected=selected)
    assert found["MindIE-SD"].state == "limit"
    assert "not installed" in found["MindIE-SD"].found
    assert "install MindIE-SD 3.1.0" in found["MindIE-SD"].remedy
    assert found["RAINFUSION_ATTN executor"].state == state
    assert "install MindIE-SD 3.1.0" in found["RAINFUSION_ATTN executor"].found


def test_it_is_not_missed_elsewhere_unless_it_is_asked_for() -> None:
    found = by_name("cpu", selected=True)
    assert {finding.state for finding in found.values()} == {"ok"}
    assert found["RAINFUSION_ATTN executor"].found.startswith("flex on cpu")
    assert by_name("cpu", "mindie", selected=True)["RAINFUSION_ATTN executor"].state == "broken"


@pytest.mark.parametrize(
    ("code", "reason"), [("", "rain_fusion_attention"), (A5, "an A5 device")], ids=["without-kernel", "a5"]
)
def test_mindie_without_tail_protection_is_named(install: Install, code: str, reason: str) -> None:
    install(code)
    finding = by_name("npu")["MindIE-SD"]
    assert finding.state == "limit"
    assert "3.1.0 without tail protection" in finding.found and reason in finding.found
    assert "multiple of 8" in finding.remedy


def test_with_a_kernel_that_takes_our_order_tails_are_protected(install: Install) -> None:
    install(KERNEL)
    found = by_name("npu", selected=True)
    assert {finding.state for finding in found.values()} == {"ok"}
    assert "protect the tail" in found["MindIE-SD"].found
