import itertools

import pytest

from vllm_omni_diffusion_compile.rainfusion.cost import reason_not_worth_it, share_of_dense
from vllm_omni_diffusion_compile.rainfusion.geometry import Grid, Layout

# Grid, rows before it, sparsity, and how many times faster than FlashAttention-3 the whole operation was with each
# executor: one H200, bf16, 8 heads of 128 (docs/rainfusion.md).
MEASURED = [
    ((62, 24, 42), 710, 0.8, {"flash": 2.372, "flex": 1.567}),
    ((62, 24, 42), 710, 0.9, {"flash": 3.075, "flex": 2.116}),
    ((62, 24, 40), 710, 0.8, {"flash": 3.011, "flex": 1.781}),
    ((62, 24, 40), 710, 0.9, {"flash": 4.549, "flex": 2.948}),
    ((37, 24, 42), 710, 0.8, {"flash": 1.968, "flex": 1.299}),
    ((37, 24, 42), 710, 0.9, {"flash": 2.298, "flex": 1.729}),
    ((21, 45, 80), 0, 0.8, {"flash": 2.071, "flex": 1.470}),
    ((21, 45, 80), 0, 0.9, {"flash": 2.443, "flex": 1.776}),
    ((21, 30, 52), 0, 0.8, {"flash": 1.275, "flex": 0.911}),
    ((21, 30, 52), 0, 0.9, {"flash": 1.279, "flex": 1.003}),
    ((31, 22, 40), 0, 0.8, {"flash": 1.172, "flex": 0.865}),
    ((31, 22, 40), 0, 0.9, {"flash": 1.235, "flex": 0.908}),
    ((31, 44, 80), 0, 0.8, {"flash": 2.306, "flex": 1.652}),
    ((31, 44, 80), 0, 0.9, {"flash": 2.892, "flex": 2.164}),
    ((62, 12, 21), 500, 0.8, {"flash": 0.793, "flex": 0.635}),
    ((62, 12, 21), 500, 0.9, {"flash": 0.823, "flex": 0.663}),
    ((62, 32, 32), 300, 0.8, {"flash": 3.264, "flex": 2.070}),
    ((62, 32, 32), 300, 0.9, {"flash": 5.116, "flex": 3.405}),
    ((4, 16, 64), 0, 0.8, {"flash": 0.201, "flex": 0.191}),
    ((4, 16, 64), 0, 0.9, {"flash": 0.189, "flex": 0.180}),
]

BIG, SMALL = Layout.after_prefix(710, (62, 24, 42)), Layout.after_prefix(0, (4, 16, 64))


@pytest.mark.parametrize("executor", ["flash", "flex"])
def test_dense_stays_where_sparse_would_not_pay(executor: str) -> None:
    assert reason_not_worth_it(BIG, 0.8, executor, 1024) is None
    reason = reason_not_worth_it(SMALL, 0.8, executor, 1024)
    assert reason is not None and "of the dense time" in reason and f"'{executor}'" in reason
    assert reason_not_worth_it(BIG, 0.05, executor, 1024) is not None


@pytest.mark.parametrize("executor", ["flash", "flex"])
@pytest.mark.parametrize(("grid", "prefix", "sparsity", "times_faster"), MEASURED)
def test_it_stays_dense_where_it_was_measured_slower_and_is_sparse_where_it_pays(
    grid: Grid, prefix: int, sparsity: float, times_faster: dict[str, float], executor: str
) -> None:
    layout, faster = Layout.after_prefix(prefix, grid), times_faster[executor]
    stays_dense = reason_not_worth_it(layout, sparsity, executor, 8 * 128) is not None
    if faster < 1:
        assert stays_dense
    if faster > 1.1:
        assert not stays_dense
    share = share_of_dense(layout, sparsity, executor, 8 * 128)
    # What is expected is never much better than what was measured: it holds for the largest density there can be.
    assert share is not None and 0.9 < share * faster < 1.5


@pytest.mark.parametrize("executor", ["flash", "flex"])
def test_less_density_and_more_rows_are_worth_more(executor: str) -> None:
    shares = [share_of_dense(BIG, sparsity, executor, 1024) for sparsity in (0.2, 0.5, 0.8, 0.9)]
    assert all(a is not None and b is not None and a > b for a, b in itertools.pairwise(shares))
    small, big = (share_of_dense(layout, 0.8, executor, 1024) for layout in (SMALL, BIG))
    assert small is not None and big is not None and small > big


def test_an_executor_that_was_not_measured_is_not_judged() -> None:
    assert share_of_dense(SMALL, 0.8, "mindie", 1024) is None
    assert reason_not_worth_it(SMALL, 0.8, "mindie", 1024) is None
