"""The planner against every other choice of buckets."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from vllm_omni_diffusion_compile.errors import RequestError
from vllm_omni_diffusion_compile.packed_length.buckets import Buckets
from vllm_omni_diffusion_compile.packed_length.plan import plan_count, plan_waste, uses
from vllm_omni_diffusion_compile.settings import aligned


def padded(requests: dict[int, int], lengths: tuple[int, ...]) -> int:
    return sum(count * (min(length for length in lengths if length >= used) - used) for used, count in requests.items())


def cheapest(requests: dict[int, int], most: int) -> int:
    """Try every choice of at most so many buckets."""
    lengths = sorted({aligned(used) for used in requests})
    choices = itertools.chain.from_iterable(itertools.combinations(lengths, n) for n in range(1, most + 1))
    return min(padded(requests, choice) for choice in choices if choice[-1] == lengths[-1])


def test_no_other_choice_of_buckets_pads_less() -> None:
    draw = random.Random(7)
    for _ in range(300):
        requests = {draw.randrange(1, 1500): draw.randrange(1, 30) for _ in range(draw.randrange(1, 9))}
        for count in range(1, 6):
            planned = plan_count(requests, count)
            assert len(planned) <= count and planned == tuple(sorted(planned)) and planned[-1] == aligned(max(requests))
            assert padded(requests, planned) == cheapest(requests, count)


def test_no_fewer_buckets_keep_the_waste() -> None:
    draw = random.Random(8)
    for _ in range(200):
        requests = {draw.randrange(64, 4000): draw.randrange(1, 30) for _ in range(draw.randrange(1, 9))}
        waste = draw.uniform(0.02, 0.4)
        used = sum(rows * count for rows, count in requests.items())
        enough = [n for n in range(1, 9) if (p := cheapest(requests, n)) / (p + used) <= waste]
        if enough:
            assert len(plan_waste(requests, waste)) == enough[0]
        else:
            with pytest.raises(RequestError, match="expected at least 0.*rounding to 64 rows wastes"):
                plan_waste(requests, waste)


def test_planned_buckets_beat_evenly_spaced_ones_where_requests_are_not() -> None:
    draw = random.Random(9)
    requests: dict[int, int] = {}
    for _ in range(20_000):  # short previews, and a few long films
        used = int(draw.gauss(9_000, 300)) if draw.random() < 0.9 else int(draw.uniform(30_000, 64_000))
        requests[used] = requests.get(used, 0) + 1
    low, high = aligned(min(requests)), aligned(max(requests))
    even = tuple(aligned(low + (high - low) * step // 8) for step in range(1, 9))
    assert padded(requests, plan_count(requests, 8)) <= 0.7 * padded(requests, even)


def test_what_the_buckets_are_used_for_adds_up() -> None:
    requests = {100: 3, 128: 1, 500: 2, 5000: 1}
    used = uses(requests, Buckets((128, 256, 512)))
    assert [(use.length, use.requests, use.padded_rows) for use in used] == [
        (128, 4, 84),
        (256, 0, 0),
        (512, 2, 24),
        (5056, 1, 56),
    ]
    assert used[0].worst_waste == 28 / 128 and used[0].mean_waste == 84 / 512 and used[2].attention_cost == 2 * 512**2


def test_the_longest_plans_there_are() -> None:
    requests = {rows: 1 + rows % 7 for rows in range(64, 2**20 + 1, 64)}
    start = time.process_time()
    assert len(plan_count(requests, 32)) == 32
    assert time.process_time() - start < 10, "linear in lengths times buckets takes about a second"


@pytest.mark.parametrize(("count", "message"), [(0, "count is 0, expected at least 1"), (-3, "count is -3")])
def test_plans_without_buckets_or_requests(count: int, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        plan_count({64: 1}, count)
    with pytest.raises(RequestError, match="no requests"):
        plan_count({}, 1)
