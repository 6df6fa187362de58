"""RAINFUSION_ATTN as vLLM-Omni selects and calls it, on CPU."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_omni_diffusion_compile.errors import SettingError

HEADS, SIZE = 2, 32
SCALE = SIZE**-0.5
GRID, PREFIX = (5, 28, 32), 77
USED = PREFIX + 5 * 28 * 32

# Options of the backend, what is changed of the metadata, and the reason that the log names.
Case = tuple[dict[str, Any], dict[str, Any], str]


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    """Forget what was said and met by other tests."""
    from vllm_omni_diffusion_compile.upstream import sparse_attention

    sparse_attention._met.clear()
    sparse_attention._named.clear()
    from vllm import logger

    logger._print_info_once.cache_clear()
    yield
    torch.compiler.reset()


@pytest.fixture(scope="module")
def inputs() -> tuple[torch.Tensor, ...]:
    """Query, key and value with 60 rows of padding behind those in use."""
    torch.manual_seed(0)
    return tuple(torch.randn(1, USED + 60, HEADS, SIZE) for _ in range(3))


def _layer(qkv_layout: str | None = "BSND", prefix: str = "blocks.3.attn", causal: bool = False, **options: Any) -> Any:
    """Make the implementation of a layer as vLLM-Omni's own Attention does."""
    from vllm_omni.diffusion.attention.selector import get_attn_backend_for_role
    from vllm_omni.diffusion.data import AttentionConfig

    backend, spec = get_attn_backend_for_role(
        "self", SIZE, AttentionConfig(default={"backend": "RAINFUSION_ATTN", "block_sparse": options})
    )
    assert backend.get_name() == "RAINFUSION_ATTN"
    return backend.get_impl_cls()(
        num_heads=HEADS, head_size=SIZE, softmax_scale=SCALE, causal=causal, num_kv_heads=HEADS, prefix=prefix,
        qkv_layout=qkv_layout, backend_kwargs=spec.backend_kwargs(), role="self", backend_explicit=True,
    )  # fmt: skip


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """As `_layer`, with the executor that needs no compiler."""
    from vllm_omni_diffusion_compile.upstream import sparse_attention

    config = SimpleNamespace(diffusion_compile_config={"rainfusion_executor": "reference"})
    monkeypatch.setattr(sparse_attention, "get_current_diffusion_config_or_none", lambda: config)
    return _layer


def _metadata(**changes: Any) -> Any:
    from vllm_omni.diffusion.attention.backends.abstract import AttentionMetadata, VideoTokenLayout

    given = {
        "extra": {"max_seqlen_q": USED, "valid_kv_length": USED},
        "video_layout": VideoTokenLayout(prefix_len=PREFIX, latent_grid=GRID),
    }
    return AttentionMetadata(**(given | changes))


def _dense(inputs: tuple[torch.Tensor, ...], used: int = USED) -> torch.Tensor:
    query, key, value = (part[:, :used].transpose(1, 2) for part in inputs)
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=SCALE).transpose(1, 2)


def test_it_is_sparse_and_says_what_was_realised(
    layer: Callable[..., Any], inputs: tuple[torch.Tensor, ...], caplog: pytest.LogCaptureFixture
) -> None:
    made = layer(sparsity=0.8)
    out, again = (made.forward(*inputs, _metadata()) for _ in range(2))
    assert torch.equal(out, again) and out.shape == inputs[0].shape
    assert not torch.allclose(out[:, :USED], _dense(inputs), atol=1e-2)
    # protected: rows before the video, and those outside of the tiles
    protected = [*range(PREFIX), *range(PREFIX + 28 * 32), PREFIX + 3 * 28 * 32 + 27 * 32 + 5]
    assert torch.allclose(out[:, protected], _dense(inputs)[:, protected], atol=1e-5)
    said = [record.getMessage() for record in caplog.records if "block pairs" in record.getMessage()]
    assert len(said) == 1
    assert "3968 of 4480 video rows are sparse, 512 are promoted" in said[0] and "sparsity 0.8" in said[0]


def test_sparsity_1_keeps_one_block_and_what_is_protected(
    layer: Callable[..., Any], inputs: tuple[torch.Tensor, ...]
) -> None:
    assert layer(sparsity=1.0).forward(*inputs, _metadata()).isfinite().all()


def _layout(**fields: Any) -> Any:
    from vllm_omni.diffusion.attention.backends.abstract import VideoTokenLayout

    return VideoTokenLayout(**fields)


@pytest.mark.parametrize(
    "case",
    [
        ({"sparsity": 0.0}, {}, "block_sparse.sparsity is 0"),
        ({"skip_layers": "0-3"}, {}, "skip_layers"),
        ({"start_step": 1}, {}, "start_step and end_step"),
        ({"end_step": 1}, {}, "start_step and end_step"),
        ({}, {"video_layout": None}, "video_layout"),
        ({}, {"extra": {"valid_kv_length": USED}}, "max_seqlen_q"),
        ({}, {"extra": {"max_seqlen_q": USED + 60}}, f"take {USED} rows, and the sequence has {USED + 60}"),
        ({}, {"attn_mask": torch.ones(1, USED + 60, dtype=torch.bool)}, "masks more than padding"),
        ({}, {"full_attn_spans": [[(0, 5)]]}, "full_attn_spans"),
    ],
)
def test_reasons_to_stay_dense(
    layer: Callable[..., Any], inputs: tuple[torch.Tensor, ...], caplog: pytest.LogCaptureFixture, case: Case
) -> None:  # fmt: skip
    options, changes, reason = case
    made, metadata = layer(**({"sparsity": 0.8} | options)), _metadata(**changes)
    out, *_ = [made.forward(*inputs, metadata) for _ in range(3)]
    used = metadata.extra.get("valid_kv_length", USED + 60) if metadata.attn_mask is None else USED + 60
    assert torch.equal(out[:, :USED], _as_the_dense_backend(inputs, used)[:, :USED])
    said = [record.getMessage() for record in caplog.records if "stays dense" in record.getMessage()]
    assert len(said) == 1 and reason in said[0]


def _as_the_dense_backend(inputs: tuple[torch.Tensor, ...], used: int) -> torch.Tensor:
    """What a server without RAINFUSION_ATTN computes: its backend is given a mask where there is padding."""
    query, key, value = (part.transpose(1, 2) for part in inputs)
    mask = None if used == key.shape[2] else (torch.arange(key.shape[2])[None] < used)[:, None, None]
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=SCALE).transpose(1, 2)


def test_a_padding_mask_of_a_known_length_is_no_reason(
    layer: Callable[..., Any], inputs: tuple[torch.Tensor, ...]
) -> None:
    made, layout = layer(sparsity=0.8), _layout(prefix_len=PREFIX, latent_grid=GRID, used_len=USED)
    mask = torch.arange(USED + 60)[None] < USED
    masked = made.forward(*inputs, _metadata(attn_mask=mask, video_layout=layout))
    assert torch.equal(masked, made.forward(*inputs, _metadata()))


def test_a_short_video_stays_dense(
    layer: Callable[..., Any], inputs: tuple[torch.Tensor, ...], caplog: pytest.LogCaptureFixture
) -> None:
    layout = _layout(prefix_len=USED - 600, latent_grid=(3, 10, 20))
    layer(sparsity=0.8).forward(*inputs, _metadata(video_layout=layout))
    assert "600 video rows are fewer than 32 blocks" in caplog.text


def test_several_videos_are_sparse(layer: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> None:
    from vllm_omni.diffusion.attention.backends.abstract import VideoTokenSpan

    spans = (VideoTokenSpan(11, (4, 16, 32), "reference"), VideoTokenSpan(2100, (3, 24, 33), "target"))
    made = layer(sparsity=0.8)
    out = made.forward(*inputs, _metadata(video_layout=_layout(used_len=USED, video_spans=spans)))
    assert torch.allclose(out[:, :11], _dense(inputs)[:, :11], atol=1e-5)
    assert not torch.allclose(out[:, :USED], _dense(inputs), atol=1e-2)


def test_steps_between_start_and_end_are_sparse(layer: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> None:
    from vllm_omni.diffusion import forward_context

    made, dense = layer(sparsity=0.8, start_step=1, end_step=2), []
    context = forward_context.ForwardContext(vllm_config=None, omni_diffusion_config=None, attn_metadata=None)
    with forward_context.override_forward_context(context):
        for step in range(5):
            context.denoise_step_idx, context.total_denoise_steps = step, 5
            out = made.forward(*inputs, _metadata())
            dense.append(torch.allclose(out[:, :USED], _dense(inputs), atol=1e-5))
    assert dense == [True, False, False, True, True]


@pytest.mark.parametrize("precision", ["fp8", "mix"])
def test_another_precision_is_refused_here(precision: str) -> None:
    with pytest.raises(SettingError, match=f"precision is '{precision}', expected 'bf16'"):
        _layer(sparsity=0.8, precision=precision)


def test_what_contradicts_it_is_refused() -> None:
    with pytest.raises(SettingError, match="causal"):
        _layer(sparsity=0.8, causal=True)
    with pytest.raises(SettingError, match="qkv_layout 'THD', expected 'BSND'"):
        _layer(sparsity=0.8, qkv_layout="THD")


@pytest.mark.parametrize("degree", ["ring_degree", "allgather_degree"])
def test_ranks_that_see_parts_of_the_keys_are_refused(monkeypatch: pytest.MonkeyPatch, degree: str) -> None:
    from vllm_omni_diffusion_compile.upstream import sparse_attention

    config = SimpleNamespace(parallel_config=SimpleNamespace(**{degree: 2}))
    monkeypatch.setattr(sparse_attention, "get_current_diffusion_config_or_none", lambda: config)
    with pytest.raises(SettingError, match=f"{degree} is 2, expected 1"):
        _layer(sparsity=0.8)


def test_a_layer_without_a_declared_layout_stays_dense(
    layer: Callable[..., Any], inputs: tuple[torch.Tensor, ...], caplog: pytest.LogCaptureFixture
) -> None:
    out = layer(qkv_layout=None, sparsity=0.8).forward(*inputs, _metadata())
    assert torch.equal(out[:, :USED], _as_the_dense_backend(inputs, USED)[:, :USED])
    assert "declares no qkv_layout" in caplog.text


def test_a_compiled_block_is_one_graph_for_all_layers_and_lengths(
    layer: Callable[..., Any], inputs: tuple[torch.Tensor, ...]
) -> None:
    """Without graph breaks, compiled once for any length, and not anew for another layer or another step."""
    counters = torch._dynamo.utils.counters
    counters.clear()
    layers = [layer(sparsity=0.8, prefix=f"blocks.{number}.attn") for number in range(3)]

    class Block(torch.nn.Module):
        def __init__(self, attention: Any) -> None:
            super().__init__()
            self.attention = attention

        def forward(self, x: torch.Tensor, prefix: int, frames: int) -> torch.Tensor:
            metadata = _metadata(
                extra={"max_seqlen_q": prefix + frames * 28 * 32},
                video_layout=_layout(prefix_len=prefix, latent_grid=(frames, 28, 32)),
            )
            out: torch.Tensor = self.attention.forward(2 * x, x + 1, x - 1, metadata) * 3
            return out

    blocks = [Block(attention) for attention in layers]
    for block in blocks:
        block.compile(dynamic=True, fullgraph=True)
    for prefix, frames in ((PREFIX, 5), (128, 5), (0, 6), (9, 2)):
        x = torch.randn(1, prefix + frames * 28 * 32, HEADS, SIZE)
        for block in blocks:
            assert torch.allclose(block(x, prefix, frames), block.forward(x, prefix, frames), atol=1e-5)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] <= 2


class BrokenExecutor:
    """Runs out of memory at every call."""

    name, takes_a_part, calls = "reference", True, 0

    def attend(self, *_: Any) -> torch.Tensor:
        self.calls += 1
        raise torch.OutOfMemoryError("found 3 GiB free, tried to allocate 5 GiB")


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> BrokenExecutor:
    from vllm_omni_diffusion_compile.upstream import sparse_attention

    executor = BrokenExecutor()
    monkeypatch.setattr(sparse_attention, "find_executor", lambda *_: executor)
    return executor


def test_a_request_is_not_lost_to_an_executor_that_fails(
    layer: Callable[..., Any], inputs: tuple[torch.Tensor, ...], caplog: pytest.LogCaptureFixture,
    broken: BrokenExecutor,
) -> None:  # fmt: skip
    layers = [layer(sparsity=0.8, prefix=f"blocks.{number}.attn") for number in range(2)]
    for made in layers * 2:
        out = made.forward(*inputs, _metadata())
        assert torch.equal(out[:, :USED], _as_the_dense_backend(inputs, USED)[:, :USED])
    assert broken.calls == 1, "what failed is tried again at every call"
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1 and "OutOfMemoryError" in said[0] and "stay dense until the process ends" in said[0]
    assert "block pairs" not in caplog.text, "the log says that it was sparse"


def test_a_compiled_block_is_not_lost_to_an_executor_that_fails(
    layer: Callable[..., Any], inputs: tuple[torch.Tensor, ...], broken: BrokenExecutor
) -> None:
    made = layer(sparsity=0.8)
    compiled = torch.compile(lambda *parts: made.forward(*parts, _metadata()) + 1, fullgraph=True)
    used = tuple(part[:, :USED] for part in inputs)
    for _ in range(2):
        assert torch.allclose(compiled(*used) - 1, _dense(inputs), atol=1e-5)
    assert broken.calls == 1


def test_on_failure_raise_raises(
    layer: Callable[..., Any], inputs: tuple[torch.Tensor, ...], monkeypatch: pytest.MonkeyPatch, broken: BrokenExecutor
) -> None:
    from vllm_omni_diffusion_compile.upstream import sparse_attention

    config = SimpleNamespace(diffusion_compile_config={"on_failure": "raise"})
    monkeypatch.setattr(sparse_attention, "get_current_diffusion_config_or_none", lambda: config)
    made = layer(sparsity=0.8)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            made.forward(*inputs, _metadata())
    assert broken.calls == 2


def test_flex_without_the_compiler_is_dense_and_says_so(
    inputs: tuple[torch.Tensor, ...], caplog: pytest.LogCaptureFixture
) -> None:
    made = _layer(sparsity=0.8)
    with torch.compiler.set_stance("force_eager"):
        out = made.forward(*inputs, _metadata())
    assert torch.equal(out[:, :USED], _as_the_dense_backend(inputs, USED)[:, :USED])
    assert "NotCompiledError" in caplog.text


class Ascend:
    """An NPU with MindIE-SD, of which is recorded how it is called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm_omni.diffusion.attention.backends import abstract

        from vllm_omni_diffusion_compile.upstream import sparse_attention

        self.is_a5 = False
        self.sparse_attention: list[dict[str, Any]] = []
        self.kernel = 0
        platform = abstract.current_omni_platform
        for module in (abstract, sparse_attention):
            monkeypatch.setattr(module, "current_omni_platform", _Npu(platform))
        entry = "mindiesd.layers.flash_attn.sparse_flash_attn_rf_v2"
        for name in ("mindiesd", "mindiesd.layers", "mindiesd.layers.flash_attn", entry):
            module = ModuleType(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            module.__path__ = []
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(sys.modules["mindiesd"], "sparse_attention", self._attend, raising=False)
        monkeypatch.setattr(sys.modules[entry], "rain_fusion_attention", self._attend_by_lists, raising=False)
        monkeypatch.setattr(sys.modules[entry], "is_a5_device", lambda: self.is_a5, raising=False)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, video_spans: Any = None, precision: str = "bf16",
        **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        self.sparse_attention.append(options | {"video_spans": video_spans, "precision": precision})
        return q + k + v

    def _attend_by_lists(self, query: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        self.kernel += 1
        if self.is_a5:
            raise RuntimeError("rain_fusion_attention is not supported on A5 devices")
        return query


class _Npu:
    """A platform that says that it is an NPU, and is as before in all else."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        if name.startswith("is_"):
            return lambda: name == "is_npu"
        return getattr(self._platform, name)


@pytest.fixture
def ascend(monkeypatch: pytest.MonkeyPatch) -> Ascend:
    return Ascend(monkeypatch)


@pytest.mark.parametrize("precision", ["bf16", "mix"])
def test_an_a5_npu_and_another_precision_take_the_route_of_the_release(
    inputs: tuple[torch.Tensor, ...], ascend: Ascend, caplog: pytest.LogCaptureFixture, precision: str
) -> None:
    ascend.is_a5 = precision == "bf16"
    out = _layer(sparsity=0.8, precision=precision).forward(*inputs, _metadata())
    query, key, value = (part[:, :USED] for part in inputs)
    assert torch.equal(out[:, :USED], query + key + value)
    (options,) = ascend.sparse_attention
    assert options["latent_shape_q"] == list(GRID) and options["txt_len"] == PREFIX
    assert options["precision"] == precision and options["sparsity"] == 0.8
    assert not ascend.kernel
    assert "leaves order and mask to MindIE-SD" in caplog.text


def test_other_npus_take_our_order_and_mask(
    layer: Callable[..., Any], inputs: tuple[torch.Tensor, ...], ascend: Ascend, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_omni_diffusion_compile.rainfusion.executors.mindie import MindIE
    from vllm_omni_diffusion_compile.upstream import sparse_attention

    monkeypatch.setattr(sparse_attention, "find_executor", lambda *_: MindIE())
    made = _layer(sparsity=0.8)
    assert not ascend.sparse_attention
    made._sparse.attend(*inputs, [USED, USED, PREFIX, *GRID], lambda: pytest.fail("it stays dense"))
    assert ascend.kernel == 1
