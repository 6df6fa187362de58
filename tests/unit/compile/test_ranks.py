"""Fallback where several ranks run a region together: two and three processes with gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("ranks_script.py")
TIMEOUT_S = 200


def run_ranks(world: int, folder: Path, *options: str, timeout_s: float = TIMEOUT_S) -> list[dict[str, Any]]:
    """Start all ranks and return what each has to tell; `folder` keeps what they say on the way."""
    env = dict(os.environ) | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    ranks = []
    for rank in range(world):
        with (folder / f"out{rank}").open("w") as out, (folder / f"err{rank}").open("w") as err:
            command = [sys.executable, str(SCRIPT), str(rank), str(world), str(folder / "store"), *options]
            ranks.append(subprocess.Popen(command, env=env, stdout=out, stderr=err))
    end = time.monotonic() + timeout_s
    try:
        for process in ranks:
            process.wait(max(0.0, end - time.monotonic()))
    finally:
        for process in ranks:
            process.kill()
    outputs = [(folder / f"out{rank}").read_text() for rank in range(world)]
    for rank, said in enumerate(outputs):
        assert said.strip(), (folder / f"err{rank}").read_text()[-3000:]
    return [json.loads(said.splitlines()[-1]) for said in outputs]


@pytest.fixture(scope="module", params=[2, 3])
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has to tell, by rank."""
    return run_ranks(request.param, tmp_path_factory.mktemp("ranks"))


FAILURES = {
    "compiling fails": (1, "RuntimeError: ptxas died"),
    "call 1": (1, "RuntimeError: kernel fault"),
    "call 3": (0, "RuntimeError: kernel fault"),
    "call 100": (1, "RuntimeError: kernel fault"),
    "out of memory": (1, "OutOfMemoryError: kernel fault"),
    "second part": (1, "RuntimeError: ptxas died"),
    "second part, call 4": (0, "RuntimeError: kernel fault"),
}


@pytest.mark.timeout(TIMEOUT_S + 30)
@pytest.mark.parametrize("story", FAILURES)
def test_a_failure_on_one_rank_loses_no_result_and_is_one_decision_of_all(
    told: list[dict[str, Any]], story: str
) -> None:
    failing, message = FAILURES[story]
    for rank, facts in enumerate(told):
        fact = facts[story]
        assert fact["right"], "every call gave what eager gives"
        assert fact["closed alone"] == (rank == failing)
        assert fact["closed after agreeing"]
        assert fact["told"] == ([message] if rank == failing else [f"rank {failing}: {message}"])
        assert not fact["told twice"]
        assert not fact["compiled is called again"]


@pytest.mark.timeout(TIMEOUT_S + 30)
def test_without_a_failure_all_stay_compiled(told: list[dict[str, Any]]) -> None:
    for facts in told:
        assert facts["nothing fails"] == {
            "right": True, "closed alone": False, "closed after agreeing": False, "told": [], "told twice": False,
            "compiled is called again": True,
        }  # fmt: skip


@pytest.mark.timeout(TIMEOUT_S + 30)
def test_ranks_that_compile_at_different_calls_do_not_wait_for_each_other(told: list[dict[str, Any]]) -> None:
    assert [facts["unequal"] for facts in told] == [{"right": True, "closed": True}] * len(told)


@pytest.mark.timeout(TIMEOUT_S + 30)
def test_a_failure_after_communicating_fails_the_request_and_names_the_rank(told: list[dict[str, Any]]) -> None:
    assert [facts["midway"] for facts in told if facts["midway"] == "answered"] == ["answered"] * (len(told) - 1)
    assert told[1]["midway"].startswith("rank 1: the compiled transformer.Midway failed after it had communicated")
    assert "RuntimeError: kernel fault" in told[1]["midway"]


@pytest.mark.timeout(TIMEOUT_S + 30)
def test_a_failure_that_is_to_be_raised_is_raised_on_all_ranks_and_names_the_one_it_was_on(
    told: list[dict[str, Any]],
) -> None:
    said = "rank 1: the compiled transformer.Raised failed (RuntimeError: ptxas died), and on_failure is 'raise'"
    for rank, facts in enumerate(told):
        for error in facts["raised"]:
            assert error.startswith(said)
            assert error.endswith("from RuntimeError('ptxas died')" if rank == 1 else "from None")


@pytest.mark.timeout(TIMEOUT_S + 30)
def test_where_failures_are_raised_a_requests_own_error_on_one_rank_keeps_no_other_waiting(
    told: list[dict[str, Any]],
) -> None:
    for rank, facts in enumerate(told):
        assert facts["own error of one"] == ["the request's own" if rank == 1 else "answered", "answered"]


@pytest.mark.timeout(TIMEOUT_S + 30)
def test_ranks_that_are_no_members_take_no_part(told: list[dict[str, Any]]) -> None:
    members = [facts["members"] for facts in told]
    assert [member["member"] for member in members] == [True, True, *[False] * (len(told) - 2)]
    assert all(member["right"] and member["closed after agreeing"] for member in members[:2])


@pytest.mark.timeout(TIMEOUT_S + 30)
def test_every_collective_is_counted(told: list[dict[str, Any]]) -> None:
    for facts in told:
        moved = {name for name, count in facts["counted"].items() if count > 0}
        assert moved == set(facts["counted"]) - {"nothing"}
