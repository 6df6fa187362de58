import itertools

import pytest

from vllm_omni_diffusion_compile.rainfusion.cost import reason_not_worth_it, share_of_dense
from vllm_omni_diffusion_compile.rainfusion.geometry import Layout

BIG, SMALL = Layout.after_prefix(710, (62, 24, 42)), Layout.after_prefix(0, (4, 16, 64))


@pytest.mark.parametrize("executor", ["flash", "flex"])
def test_dense_stays_where_sparse_would_not_pay(executor: str) -> None:
    assert reason_not_worth_it(BIG, 0.8, executor, 1024) is None
    reason = reason_not_worth_it(SMALL, 0.8, executor, 1024)
    assert reason is not None and "of the dense time" in reason and f"'{executor}'" in reason
    assert reason_not_worth_it(BIG, 0.05, executor, 1024) is not None


@pytest.mark.parametrize("executor", ["flash", "flex"])
def test_less_density_and_more_rows_are_worth_more(executor: str) -> None:
    shares = [share_of_dense(BIG, sparsity, executor, 1024) for sparsity in (0.2, 0.5, 0.8, 0.9)]
    assert all(a is not None and b is not None and a > b for a, b in itertools.pairwise(shares))
    small, big = (share_of_dense(layout, 0.8, executor, 1024) for layout in (SMALL, BIG))
    assert small is not None and big is not None and small > big


def test_an_executor_that_was_not_measured_is_not_judged() -> None:
    assert share_of_dense(SMALL, 0.8, "mindie", 1024) is None
    assert reason_not_worth_it(SMALL, 0.8, "mindie", 1024) is None
