"""Which grafts can go: from what each release says of a row to what becomes of it."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from tools import grafts
from tools.grafts import Finding, Release, State, judge, verdict
from vllm_omni_diffusion_compile.upstream.graft import Graft

SUPPORTED = ("0.28.0", "0.30.0")
HAVE_IT = "can be removed: all supported releases that it is for have it"


def said(*states: State, codes: tuple[str, ...] = ("same", "same", "same")) -> dict[str, Finding]:
    releases = (*SUPPORTED, "0.32.0")
    return {
        release: Finding(0, "host:name", state, "a reason", code if state == "needed" else None)
        for release, state, code in zip(releases, states, codes, strict=False)
    }


@pytest.mark.parametrize(
    ("findings", "removable", "broken", "text"),
    [
        (said("needed", "needed"), False, False, "needed"),
        (said("needed", "native"), False, False, "needed by older releases; native since 0.30.0"),
        (said("native", "native"), True, False, HAVE_IT),
        (said("not for it", "native"), True, False, HAVE_IT),
        (said("needed", "not for it"), False, False, "needed until 0.28.0 is no longer supported"),
        (said("not for it", "needed"), False, False, "needed"),
        (said("not for it", "not for it"), True, False, "can be removed: it is for no supported release"),
        (said("needed", "does not fit"), False, True, "does not fit 0.30.0: a reason"),
        (said("gone", "needed"), False, True, "does not fit 0.28.0: a reason"),
        # What is not supported yet says what will come, and changes nothing of what is needed.
        (said("needed", "needed", "native"), False, False, "needed by older releases; native since 0.32.0"),
        (said("needed", "needed", "gone"), False, False, "needed; will not fit 0.32.0: a reason"),
        (said("native", "native", "gone"), True, False, HAVE_IT),
        (
            said("needed", "needed", "needed", codes=("old", "same", "new")), False, False,
            "needed; its code in 0.32.0 is not that of 0.30.0: read its remove_when",
        ),
        (said("needed", "needed", "needed", codes=("old", "same", "same")), False, False, "needed"),
    ],
)  # fmt: skip
def test_a_row_goes_once_no_supported_release_needs_it(
    findings: dict[str, Finding], removable: bool, broken: bool, text: str
) -> None:
    found = verdict(findings, SUPPORTED)
    assert (found.removable, found.broken, found.text) == (removable, broken, text)


def releases(*states: State) -> list[Release]:
    return [Release(version, version in SUPPORTED, (found,)) for version, found in said(*states).items()]


def test_releases_are_put_in_order() -> None:
    assert judge(releases("needed", "native")[::-1])[0][1].text == "needed by older releases; native since 0.30.0"


@pytest.mark.parametrize(
    ("states", "status"), [(("needed", "native"), 0), (("native", "native"), 1), (("gone", "needed"), 1)]
)
def test_the_status_says_that_there_is_something_to_do(
    states: tuple[State, State], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = dict(zip(SUPPORTED, releases(*states), strict=True))
    monkeypatch.setattr(grafts, "ask", lambda python: answers[python.name])
    assert grafts.main([*SUPPORTED]) == status
    printed = capsys.readouterr().out
    assert "Grafts on vLLM-Omni 0.28.0, 0.30.0" in printed
    assert f"1 rows, {int(states[0] == 'native')} of which can be removed" in printed


# --- what a release says of a row ------------------------------------------------------------------------------------


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("a_host")
    monkeypatch.setitem(sys.modules, "a_host", module)
    return module


def row(**more: Any) -> Graft:
    return Graft(
        target="a_host:name", make=lambda found: found,
        why="It has to.", upstream="none: a test", remove_when="the test is over", **more,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("graft", "attributes", "state"),
    [
        (row(parameters=("self",)), {"name": lambda self: None}, "needed"),
        (row(parameters=("self",)), {"name": lambda other: None}, "does not fit"),
        (row(parameters=("self",)), {}, "does not fit"),
        (row(adds=True), {}, "needed"),
        (row(adds=True), {"name": 1}, "native"),
        (row(value=int, native=lambda module: hasattr(module, "better")), {"name": 1}, "needed"),
        (row(value=int, native=lambda module: hasattr(module, "better")), {"name": 1, "better": 2}, "native"),
        (row(value=tuple, present=lambda module: "ours" in module.name), {"name": ("ours",)}, "native"),
    ],
)
def test_a_release_is_asked_with_the_rows_own_probes(
    host: ModuleType, graft: Graft, attributes: dict[str, Any], state: State
) -> None:
    vars(host).update(attributes)
    assert grafts._ask(0, "a_host:name", graft).state == state


def test_a_module_that_is_gone_is_a_finding() -> None:
    found = grafts._ask(0, "a_host:name", row(adds=True))
    assert found.state == "gone" and "a_host" in found.detail
