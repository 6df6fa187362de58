from __future__ import annotations

import random

import pytest

from tests.unit.bench.results import metric, result
from vllm_omni_diffusion_compile.bench.figures import Compiled, figures, joint_noise, noise, quantile, ratio, slower


def test_median_p95_and_first_requests_by_hand() -> None:
    (arm,) = figures(result({"eager": [[[1.0, 1.2, 1.4], [1.1, 1.3, 1.5]]]}, {"eager": (30.0, 12.0)}))
    latency = arm.shapes[0]
    assert latency.median == pytest.approx(1.25)
    # Ordered 1.0 to 1.5 in steps of 0.1: 0.95 of five steps is 4.75.
    assert latency.p95 == pytest.approx(1.475)
    assert (latency.count, latency.first_cold, latency.first_warm) == (6, 7.0, 6.0)
    assert (arm.ready_cold_s, arm.ready_warm_s, arm.peak_memory_mb) == (30.0, 12.0, 1024.0)


def test_with_few_samples_the_noise_is_half_their_range() -> None:
    assert noise([[1.0, 1.1], [0.9]]) == pytest.approx(0.1)


@pytest.mark.parametrize(("count", "left_out"), [(1, 0), (5, 0), (6, 0), (9, 1), (20, 5), (100, 39)])
def test_interval_of_the_median_is_that_of_the_tables(count: int, left_out: int) -> None:
    # Source: the 95 % intervals by order statistics that textbooks print: the (k+1)th smallest and largest of n.
    samples = [float(number) for number in range(1, count + 1)]
    middle = (count + 1) / 2
    assert noise([samples]) == pytest.approx((middle - 1 - left_out) / middle)


def test_noise_covers_the_true_median_as_often_as_it_says() -> None:
    generator = random.Random(7)
    covered = 0
    for _ in range(400):
        samples = [generator.expovariate(1.0) + 1.0 for _ in range(30)]
        middle = quantile(sorted(samples), 0.5)
        covered += abs(middle - 1.6931) <= noise([samples]) * middle
    assert 0.90 <= covered / 400 <= 0.99


def test_starts_that_differ_are_noise_even_where_their_samples_do_not() -> None:
    assert noise([[1.0] * 20, [1.2] * 20]) == pytest.approx(0.1 / 1.1)


def test_compilation_is_added_up_and_an_eager_server_says_nothing() -> None:
    made = result({"eager": [[[1.0], [1.0]]], "regional-dynamic": [[[1.0], [1.0]]]})
    made.starts[2].metrics = [
        metric("compilations", 3, after=False),
        metric("compilations", 2, after=False),
        metric("s", 4.5, after=False),
        metric("compilations", 1, after=True),
        metric("fallbacks", 1, after=True),
        metric("recompile_limit", 1, after=False),
    ]
    eager, regional = figures(made)
    assert eager.cold is None
    assert regional.cold == Compiled(before=5, before_s=4.5, after=1, fallbacks=2)


def test_ratio_is_the_geometric_mean_over_the_shapes() -> None:
    made = result({"eager": [[[1.0], [1.0]], [[4.0], [4.0]]], "full-dynamic": [[[0.5], [0.5]], [[4.0], [4.0]]]})
    eager, full = figures(made)
    assert ratio(full, eager) == pytest.approx(0.5**0.5)
    assert slower(eager, full) and not slower(full, eager)


def test_noise_of_two_arms_is_the_sum_of_theirs() -> None:
    made = result({"eager": [[[0.9, 1.0, 1.1], [1.0]]], "full-dynamic": [[[0.8, 1.0, 1.2], [1.0]]]})
    assert joint_noise(*figures(made)) == pytest.approx(0.1 + 0.2)
