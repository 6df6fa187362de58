import math
from collections.abc import Callable

import pytest
import torch

from tests.unit.rainfusion.mindie_kernel import rain_fusion_attention
from vllm_omni_diffusion_compile.errors import SettingError
from vllm_omni_diffusion_compile.rainfusion.executors import Executor, find_executor
from vllm_omni_diffusion_compile.rainfusion.executors.flex import Flex, NotCompiledError, _compiled
from vllm_omni_diffusion_compile.rainfusion.executors.mindie import MindIE, MindIEError
from vllm_omni_diffusion_compile.rainfusion.executors.reference import Reference
from vllm_omni_diffusion_compile.rainfusion.geometry import BLOCK, Grid, Layout, Span, plan
from vllm_omni_diffusion_compile.rainfusion.operation import SparseAttention, dense_sdpa
from vllm_omni_diffusion_compile.rainfusion.selection import Selection

CPU = torch.device("cpu")
ALIGNED, RAGGED, SEVERAL = (
    Layout.after_prefix(0, (5, 16, 16)),
    Layout.after_prefix(97, (4, 20, 21)),
    Layout(3900, (Span(10, (3, 16, 10)), Span(600, (4, 16, 16)), Span(1700, (2, 24, 42)))),
)
SIZE = 16
SCALE = SIZE**-0.5

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _inputs(layout: Layout, *, batch: int = 1, dtype: torch.dtype = torch.float32) -> Inputs:
    torch.manual_seed(0)
    query, key, value = (torch.randn(batch, layout.used, 2, SIZE).to(dtype) for _ in range(3))
    return query, key, value


def _dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return dense_sdpa(query, key, value, SCALE)


def _attend(
    inputs: Inputs, layout: Layout, sparsity: float, executor: Executor,
    observe: Callable[[Selection], None] | None = None,
) -> torch.Tensor:  # fmt: skip
    return SparseAttention(sparsity, SCALE, executor, _dense)(*inputs, plan(layout, CPU), observe)


@pytest.mark.parametrize("layout", [ALIGNED, RAGGED, SEVERAL])
@pytest.mark.parametrize("executor", [Reference(), MindIE(rain_fusion_attention)])
def test_sparsity_0_is_dense_attention(layout: Layout, executor: Executor) -> None:
    inputs = _inputs(layout)
    assert torch.allclose(_attend(inputs, layout, 0.0, executor), _dense(*inputs), atol=1e-5)


@pytest.mark.parametrize("layout", [ALIGNED, RAGGED, SEVERAL])
@pytest.mark.parametrize("sparsity", [0.5, 0.8, 1.0])
def test_the_reference_masks_exactly_what_was_not_chosen(layout: Layout, sparsity: float) -> None:
    """Against a mask of rows, made from the selection in the plainest way."""
    inputs, made, seen = _inputs(layout), plan(layout, CPU), list[Selection]()
    out = _attend(inputs, layout, sparsity, Reference(), seen.append)
    blocks = torch.ones(1, 2, layout.blocks, layout.blocks, dtype=torch.bool)
    blocks[:, :, made.query_blocks[: made.choosing_blocks]] = seen[0].mask
    rows = blocks.repeat_interleave(BLOCK, -1).repeat_interleave(BLOCK, -2)[..., : layout.used, : layout.used]
    rows = rows[..., made.key_inverse, :][..., made.key_inverse]
    query, key, value = (part.transpose(1, 2) for part in inputs)
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=rows, scale=SCALE)
    assert torch.allclose(out, wanted.transpose(1, 2), atol=1e-5)
    # and it did leave something out
    assert not torch.allclose(out, _dense(*inputs), atol=1e-3)


def test_what_is_protected_is_as_dense_at_any_sparsity() -> None:
    inputs, made = _inputs(RAGGED), plan(RAGGED, CPU)
    out = _attend(inputs, RAGGED, 1.0, Reference())
    protected = made.query_order[made.choosing_rows :]
    assert torch.allclose(out[:, protected], _dense(*inputs)[:, protected], atol=1e-5)


def test_the_reference_computes_a_long_sequence_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = _inputs(RAGGED, batch=2)
    whole = _attend(inputs, RAGGED, 0.8, Reference())
    monkeypatch.setattr("vllm_omni_diffusion_compile.rainfusion.executors.reference._SCORES", 1)
    assert torch.allclose(_attend(inputs, RAGGED, 0.8, Reference()), whole, atol=1e-6)


@pytest.mark.parametrize("layout", [RAGGED, SEVERAL])
@pytest.mark.parametrize("batch", [1, 2])
def test_mindie_is_told_the_order_and_the_mask(layout: Layout, batch: int) -> None:
    inputs = _inputs(layout, batch=batch)
    out = _attend(inputs, layout, 0.8, MindIE(rain_fusion_attention))
    assert torch.allclose(out, _attend(inputs, layout, 0.8, Reference()), atol=1e-5)


def test_without_mindie_the_error_says_what_to_do() -> None:
    with pytest.raises(MindIEError, match="install MindIE-SD"):
        MindIE()


def test_flex_agrees_with_the_reference_and_compiles_once_for_all_masks() -> None:
    """One test for all of it: every length compiled anew takes some ten seconds."""
    torch.compiler.reset()
    _compiled.cache_clear()
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    for layout, limit in ((RAGGED, 1), (ALIGNED, 2), (SEVERAL, 2)):
        inputs = _inputs(layout)
        for sparsity in (0.0, 0.5, 0.9):
            out, wanted = (_attend(inputs, layout, sparsity, executor) for executor in (Flex(), Reference()))
            assert torch.allclose(out, wanted, atol=1e-5), (layout, sparsity)
        # the first length by itself, the second one for every other
        assert graphs["unique_graphs"] - before == limit
    inputs = _inputs(RAGGED, dtype=torch.bfloat16)
    out, wanted = (_attend(inputs, RAGGED, 0.8, executor).float() for executor in (Flex(), Reference()))
    assert float((out - wanted).norm() / wanted.norm()) < 2e-2


def test_flex_without_the_compiler_is_an_error_and_not_dense() -> None:
    with torch.compiler.set_stance("force_eager"), pytest.raises(NotCompiledError, match="without the compiler"):
        _attend(_inputs(ALIGNED), ALIGNED, 0.8, Flex())


@pytest.mark.parametrize(("name", "device", "expected"), [("auto", "cpu", "flex"), ("reference", "cpu", "reference")])
def test_auto_is_what_runs_on_the_device(name: str, device: str, expected: str) -> None:
    assert find_executor(name, device, 128).name == expected


def test_an_executor_that_does_not_exist_is_named() -> None:
    with pytest.raises(SettingError, match="'fastest', expected one of auto, "):
        find_executor("fastest", "cpu", 128)


def test_rows_are_put_back_where_they_came_from() -> None:
    """Values that name their row, with scores that make every query look only at itself."""
    grid: Grid = (5, 19, 21)
    layout = Layout.after_prefix(33, grid)
    assert layout.used == 33 + math.prod(grid)
    torch.manual_seed(0)
    key = torch.nn.functional.normalize(torch.randn(1, layout.used, 1, 64), dim=-1)
    value = torch.arange(layout.used, dtype=torch.float32).view(1, -1, 1, 1).expand(-1, -1, -1, 64)
    attention = SparseAttention(0.0, 4000.0, Reference(), lambda q, k, v: dense_sdpa(q, k, v, 4000.0))
    out = attention(key, key, value, plan(layout, CPU))
    assert torch.equal(out.round(), value)
