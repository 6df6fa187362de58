"""Events on their way: none lost, none counted twice."""

from __future__ import annotations

import pickle

import pytest

from vllm_omni_diffusion_compile.compile.delivery import Cursor, Incoming, Outgoing
from vllm_omni_diffusion_compile.compile.events import EventLog


@pytest.fixture
def log() -> EventLog:
    return EventLog()


def regions(incoming: Incoming) -> list[str]:
    return [event["region"] for event in incoming.drain()]


def test_a_result_of_nothing_compiled_carries_nothing(log: EventLog) -> None:
    outgoing = Outgoing(log)
    assert [outgoing.with_result() for _ in range(20)] == [None] * 20


def test_an_event_arrives_although_the_results_that_carried_it_first_were_dropped(log: EventLog) -> None:
    outgoing, incoming = Outgoing(log), Incoming()
    log.record("compilation", "transformer", "Block", shapes=("x: bfloat16[1, 2]",), seconds=2.5)
    for _ in range(5):
        outgoing.with_result()  # of requests that were aborted
    parcel = outgoing.with_result()
    assert parcel is not None
    incoming.take(pickle.loads(pickle.dumps(parcel)))
    (event,) = incoming.drain()
    assert (event["component"], event["region"], event["shapes"]) == ("transformer", "Block", ["x: bfloat16[1, 2]"])


def test_results_carry_an_event_for_a_while_and_it_is_taken_once(log: EventLog) -> None:
    outgoing, incoming = Outgoing(log), Incoming()
    parcels = []
    for n in range(30):
        if n in {3, 5}:
            log.record("recompilation", "transformer", f"at {n}")
        parcels.append(outgoing.with_result())
    assert parcels[:3] == [None] * 3 and all(parcels[3:11]) and parcels[13:] == [None] * 17
    for parcel in parcels:
        if parcel is not None:
            incoming.take(parcel)
    assert regions(incoming) == ["at 3", "at 5"]
    assert not incoming.waiting and incoming.drain() == []


def test_what_was_sent_as_a_whole_is_not_sent_with_results_again(log: EventLog) -> None:
    outgoing, incoming = Outgoing(log), Incoming()
    log.record("compilation", "transformer", "at the start")
    first = outgoing.with_result()
    incoming.take(outgoing.everything())
    assert outgoing.with_result() is None
    assert first is not None
    incoming.take(first)  # late
    log.record("recompilation", "transformer", "later")
    last = outgoing.with_result()
    assert last is not None
    incoming.take(last)
    assert regions(incoming) == ["at the start", "later"]


def test_what_is_not_kept_is_not_offered_again(log: EventLog) -> None:
    incoming = Incoming()
    log.record("compilation", "transformer", "Block")
    log.record("fallback", "vae", "decode", error="RuntimeError")
    parcel = Outgoing(log).everything()
    kept = incoming.take(parcel, lambda event: event.kind == "fallback")
    assert [event.region for event in kept] == ["decode"]
    assert incoming.take(parcel) == []
    assert regions(incoming) == ["decode"]


def test_processes_are_told_apart(log: EventLog) -> None:
    incoming = Incoming()
    log.record("compilation", "transformer", "Block")
    parcel = Outgoing(log).everything()
    other = {**parcel, "pid": parcel["pid"] + 1}
    incoming.take(parcel)
    incoming.take(other)  # type: ignore[arg-type]
    assert regions(incoming) == ["Block", "Block"]


def test_a_cursor_reads_each_event_once(log: EventLog) -> None:
    cursor = Cursor(log)
    log.record("compilation", "transformer", "one")
    assert [event.region for event in cursor.new()] == ["one"]
    assert cursor.new() == []
    log.record("compilation", "transformer", "two")
    assert [event.region for event in cursor.new()] == ["two"]
