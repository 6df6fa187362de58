"""The attention backend that vLLM-Omni is given for RAINFUSION_ATTN.

Imported once vLLM-Omni has imported its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.model_executor.models.utils import extract_layer_index
from vllm_omni.diffusion.attention.backends.abstract import AttentionImpl, AttentionMetadata
from vllm_omni.diffusion.attention.selector import get_attn_backend_for_role
from vllm_omni.diffusion.config import get_current_diffusion_config_or_none
from vllm_omni.diffusion.forward_context import get_forward_context, is_forward_context_available
from vllm_omni.platforms import current_omni_platform

from vllm_omni_diffusion_compile.compile.events import LOG
from vllm_omni_diffusion_compile.compile.fallback import FallbackCallable
from vllm_omni_diffusion_compile.compile.latch import Failure, Latch
from vllm_omni_diffusion_compile.compile.state import ArgumentState
from vllm_omni_diffusion_compile.errors import SettingError
from vllm_omni_diffusion_compile.rainfusion.cost import reason_not_worth_it
from vllm_omni_diffusion_compile.rainfusion.executors import Executor, find_executor
from vllm_omni_diffusion_compile.rainfusion.executors.mindie import why_not_mindie
from vllm_omni_diffusion_compile.rainfusion.geometry import Layout, Span, plan
from vllm_omni_diffusion_compile.rainfusion.operation import SparseAttention
from vllm_omni_diffusion_compile.rainfusion.selection import Selection
from vllm_omni_diffusion_compile.settings import DiffusionCompileSettings
from vllm_omni_diffusion_compile.upstream.log import host_logger

logger = host_logger(__name__)

_NAME = "RAINFUSION_ATTN"
_LAYOUT = "BSND"
# Any head size that vLLM-Omni may ask about: what an executor cannot take, it says itself.
_UNKNOWN_HEAD_SIZE = -1
_ROLE = "dense rows of RAINFUSION_ATTN"


def derive(host: Any) -> type:
    """Derive the backend from vLLM-Omni's own, which runs on Ascend NPU only."""

    class RainFusionBackend(host):  # type: ignore[misc] # its type is known when vLLM-Omni is there
        supported_platforms = ("cuda", "npu", current_omni_platform._omni_enum.OOT.value)

        @classmethod
        def validate_available(cls) -> None:
            if current_omni_platform.is_npu():
                super().validate_available()

        @staticmethod
        def get_supported_head_sizes() -> list[int]:
            return []

        @staticmethod
        def get_impl_cls() -> type[AttentionImpl]:
            return impl

        @classmethod
        def supports_attention_mask(cls, attention_spec: object | None = None) -> bool:
            asks = getattr(_dense_backend(_UNKNOWN_HEAD_SIZE), "supports_attention_mask", None)
            return asks is None or bool(asks(attention_spec))

        @classmethod
        def supports_packed_mask_free(cls) -> bool:
            return bool(_dense_backend(_UNKNOWN_HEAD_SIZE).supports_packed_mask_free())

    impl = type("RainFusionImpl", (RainFusionImpl,), {"_host": host.get_impl_cls()})
    return RainFusionBackend


def _dense_backend(head_size: int) -> Any:
    """Return the platform's own choice for dense attention."""
    backend, _ = get_attn_backend_for_role(_ROLE, head_size)
    return backend


@dataclass(frozen=True)
class Steps:
    """Denoise steps that attend sparsely.

    Args:
        first: How many of the first ones stay dense.
        last: How many of the last ones stay dense.
    """

    first: int
    last: int

    def are_dense_now(self) -> bool:
        """Whether the step that runs now is one that stays dense."""
        step = steps = None
        if is_forward_context_available():
            context = get_forward_context()
            step, steps = context.denoise_step_idx, context.total_denoise_steps
        if (self.first and step is None) or (self.last and (step is None or steps is None)):
            return True
        if step is None:
            return False
        return step < self.first or (self.last > 0 and steps is not None and step >= steps - self.last)


@dataclass(frozen=True)
class Sparse:
    """Sparse attention of all layers that have the same options; `forward` of each is compiled with its name only.

    Args:
        sparsity: Share of key blocks that are left out.
        scale: Of the scores.
        steps: Which of them are sparse.
        executor: What the user named.
        head_size: Of a head.
        dense: vLLM-Omni's dense attention.
        fails_closed: Raise what an executor raises, in place of attending densely.
    """

    sparsity: float
    scale: float
    steps: Steps
    executor: str
    head_size: int
    dense: Any
    fails_closed: bool

    def __deepcopy__(self, _: object) -> Sparse:
        """A copy of a layer belongs to the same layers."""
        return self

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, numbers: Sequence[int],
        densely: Callable[[], torch.Tensor],
    ) -> torch.Tensor:  # fmt: skip
        """Attend sparsely, or densely where that is not to be.

        Args:
            query: [batch, rows, heads, head_dim]; rows beyond those in use are padding, and come back as zeros.
            key: As `query`.
            value: As `query`.
            numbers: As `_numbers` returns them.
            densely: What to do otherwise.
        """
        if self.steps.are_dense_now():
            _say_dense("this denoise step is outside of start_step and end_step")
            return densely()
        layout, reason = _read(tuple(numbers))
        if reason is None and not query.shape == key.shape == value.shape:
            reason = f"query is {tuple(query.shape)} and key is {tuple(key.shape)}, which is not the same sequence"
        if layout is None or reason is not None:
            _say_dense(reason)
            return densely()
        executor = find_executor(self.executor, query.device.type, self.head_size)
        if self.executor == "auto" and query.is_cuda:  # measured there
            reason = reason_not_worth_it(layout, self.sparsity, executor.name, query.shape[2] * query.shape[3])
            if reason is not None:
                _say_dense(reason)
                return densely()
        return self._unless_it_fails(densely, query, key, value, layout, executor)

    @functools.cached_property
    def _unless_it_fails(self) -> Callable[..., torch.Tensor]:
        """Attend sparsely until an executor fails, from then on densely: a request is not lost to it."""

        def eagerly(densely: Callable[[], torch.Tensor], *_: object) -> torch.Tensor:
            return densely()

        latch = Latch(_NAME, self._say_failed)
        return FallbackCallable(eagerly, self._sparsely, latch, state=ArgumentState(), fails_closed=self.fails_closed)

    def _sparsely(
        self, _: object, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: Layout, executor: Executor
    ) -> torch.Tensor:
        used = layout.used
        attention = SparseAttention(self.sparsity, self.scale, executor, self._rows_densely)
        # A profile names what ran: operators of an executor are also those of other code.
        with torch.profiler.record_function(f"{_NAME} {executor.name}"):
            out = attention(
                query[:, :used],
                key[:, :used],
                value[:, :used],
                plan(layout, query.device),
                self._observer(layout, executor),
            )
        return torch.nn.functional.pad(out, (0, 0, 0, 0, 0, query.shape[1] - used)) if used < query.shape[1] else out

    def _say_failed(self, failure: Failure) -> None:
        logger.warning(
            "%s: sparse attention with the executor '%s' failed (%s: %s), and dense attention gave the result. Layers "
            "with these options stay dense until the process ends. Another executor may work: set it with "
            "--diffusion-compile-config.rainfusion_executor.",
            _NAME, self.executor, failure.error_type, failure.reason,
        )  # fmt: skip
        LOG.record("fallback", "attention", _NAME, error=failure.error_type, reason=failure.reason)

    def _rows_densely(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.dense.forward(query, key, value, None)
        return out

    def _observer(self, layout: Layout, executor: Executor) -> Callable[[Selection], None] | None:
        """Say what was realised when a layout is met for the first time. Counting blocks waits for the device."""
        met = (layout, self.sparsity)
        if met in _met:
            return None
        _met.add(met)

        def say(selection: Selection) -> None:
            low, high = layout.density(self.sparsity)
            logger.info(
                "%s: %d rows with video of grid %s. %d of %d video rows are sparse, %d are promoted; %.3f of all block "
                "pairs are computed (%.3f to %.3f, by content) at sparsity %g, with the executor '%s'.",
                _NAME, layout.used, " and ".join(str(span.grid) for span in layout.spans), layout.sparse_rows,
                layout.video_rows, layout.promoted_rows,
                selection.density(plan(layout, selection.mask.device)), low, high, self.sparsity, executor.name,
            )  # fmt: skip

        return say


# Layouts of which was said what they are like, and the sparse attention of each name.
_met: set[tuple[Layout, float]] = set()
_named: dict[str, Sparse] = {}


class RainFusionImpl(AttentionImpl):  # type: ignore[misc]
    """Sparse attention over the video of a packed sequence; dense attention wherever that cannot be.

    Args:
        num_heads: Of queries.
        head_size: Of a head.
        softmax_scale: Of the scores.
        causal: Refused, since blocks know no order.
        num_kv_heads: Of keys.
        prefix: Name of the layer, with its number.
        qkv_layout: What the layer declares; None stays dense.
        backend_kwargs: `sparsity`, `start_step`, `end_step`, `skip_layers` and `precision` of the attention
            configuration.
        extra: What else vLLM-Omni tells its backends.

    Raises:
        SettingError: An option that cannot be honoured.
    """

    _host: type[AttentionImpl]

    def __init__(  # noqa: PLR0913, PLR0917 - the signature is the host's
        self,
        num_heads: int,
        head_size: int,
        softmax_scale: float,
        causal: bool = False,
        num_kv_heads: int | None = None,
        prefix: str = "",
        qkv_layout: str | None = None,
        backend_kwargs: dict[str, Any] | None = None,
        **extra: Any,
    ) -> None:
        options = dict(backend_kwargs or {})
        common = {
            "num_heads": num_heads, "head_size": head_size, "softmax_scale": softmax_scale, "causal": causal,
            "num_kv_heads": num_kv_heads, "prefix": prefix, "qkv_layout": qkv_layout,
        }  # fmt: skip
        sparsity = float(options.get("sparsity", 0.0))
        precision = str(options.get("precision", "bf16"))
        if precision != "bf16" and not current_omni_platform.is_npu():
            raise SettingError(
                f"block_sparse.precision is {precision!r}, expected 'bf16': other precisions of {_NAME} run on "
                "Ascend NPU only; leave it out"
            )
        host_config = get_current_diffusion_config_or_none()
        config = DiffusionCompileSettings.of(host_config).diffusion_compile_config
        self._theirs = None
        reason = _reason_to_leave_it_to_mindie(precision, host_config, config.rainfusion_executor)
        if reason is not None:
            logger.info_once("%s leaves order and mask to MindIE-SD: %s.", _NAME, reason)
            self._theirs = self._host(**common, backend_kwargs=backend_kwargs, **extra)
            return
        if sparsity > 0:
            _refuse(causal, qkv_layout)
        dense = _dense_backend(head_size)
        # What the model was told that it may leave to this backend, the dense one may not do.
        self._needs_mask = not (dense.supports_prefix_kv_slicing or dense.supports_packed_mask_free())
        self._dense_impl: AttentionImpl = dense.get_impl_cls()(**common)
        skipped = _layer_index(prefix) in (options.get("skip_layers") or ())
        self._never = _reason_never(sparsity, skipped, qkv_layout)
        steps, executor = (
            Steps(int(options.get("start_step", 0)), int(options.get("end_step", 0))),
            config.rainfusion_executor,
        )
        fails_closed = config.on_failure == "raise"
        sparse = Sparse(sparsity, softmax_scale, steps, executor, head_size, self._dense_impl, fails_closed)
        self._name = f"{sparsity} {softmax_scale} {steps} {executor} {num_heads}x{head_size} {fails_closed}"
        self._sparse = _named.setdefault(self._name, sparse)

    def attend_densely_with(self, dense: AttentionImpl) -> None:
        """Take another implementation for whatever is dense from now on, unless it is one of that kind already.

        Args:
            dense: One that takes masks.
        """
        if self._theirs is None and not isinstance(self._dense_impl, type(dense)):
            self._dense_impl, self._needs_mask = dense, True
            self._name += f" {type(dense).__name__}"
            self._sparse = _named.setdefault(self._name, replace(self._sparse, dense=dense))

    def supports_kv_cache_dtype(self, kv_cache_dtype: str | None, platform_key: str) -> bool:
        """Only MindIE-SD's own path quantizes."""
        return kv_cache_dtype is None or (
            self._theirs is not None and bool(self._theirs.supports_kv_cache_dtype(kv_cache_dtype, platform_key))
        )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_metadata: AttentionMetadata | None = None,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: [batch, rows, heads, head_dim].
            key: [batch, rows, heads, head_dim].
            value: As `key`.
            attn_metadata: What the model says of the sequence.
        """
        if self._theirs is not None:
            theirs: torch.Tensor = self._theirs.forward(query, key, value, attn_metadata)
            return theirs
        reason = self._never or _reason_of_metadata(attn_metadata)
        if reason is not None or attn_metadata is None:
            _say_dense(reason)
            return self._densely(query, key, value, attn_metadata)
        numbers = _numbers(attn_metadata)
        if torch.compiler.is_compiling():
            out: torch.Tensor = torch.ops.vllm_omni_diffusion_compile.rainfusion(
                query, key, value, attn_metadata.attn_mask, self._name, self._needs_mask, numbers
            )
            return out
        return self._sparse.attend(
            query, key, value, numbers, lambda: self._densely(query, key, value, attn_metadata)
        )  # fmt: skip

    def _densely(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_metadata: AttentionMetadata | None
    ) -> torch.Tensor:
        if attn_metadata is not None and self._needs_mask and attn_metadata.attn_mask is None:
            mask = _padding_mask(key, attn_metadata.extra.get("valid_kv_length"))
            attn_metadata = attn_metadata if mask is None else replace(attn_metadata, attn_mask=mask)
        out: torch.Tensor = self._dense_impl.forward(query, key, value, attn_metadata)
        return out


def _padding_mask(key: torch.Tensor, used: int | None) -> torch.Tensor | None:
    """Make the mask that the model makes for a backend that cannot cut keys off."""
    return None if used is None or used >= key.shape[1] else torch.arange(key.shape[1], device=key.device)[None] < used


@torch.library.custom_op(
    "vllm_omni_diffusion_compile::rainfusion",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? mask, str name, bool needs_mask, SymInt[] numbers)"
    " -> Tensor",
)
def _rainfusion(  # noqa: PLR0913, PLR0917 - an operator takes tensors and numbers, and no objects
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, name: str,
    needs_mask: bool, numbers: Sequence[int],
) -> torch.Tensor:  # fmt: skip
    """The same for a compiled graph: what depends on the step or on the length is decided when it runs."""
    sparse = _named[name]

    def densely() -> torch.Tensor:
        padding = _padding_mask(key, numbers[0]) if needs_mask and mask is None else mask
        metadata = None if padding is None else AttentionMetadata(attn_mask=padding)
        if metadata is not None or numbers[0] in (-1, key.shape[1]):
            out: torch.Tensor = sparse.dense.forward(query, key, value, metadata)
            return out
        used = numbers[0]
        part: torch.Tensor = sparse.dense.forward(query[:, :used], key[:, :used], value[:, :used], None)
        return torch.nn.functional.pad(part, (0, 0, 0, 0, 0, key.shape[1] - used))

    return sparse.attend(query, key, value, numbers, densely).contiguous()


@_rainfusion.register_fake
def _(query: torch.Tensor, *_: object) -> torch.Tensor:
    return query.new_empty(query.shape)


def _refuse(causal: bool, qkv_layout: str | None) -> None:
    """Refuse what contradicts sparse attention.

    Raises:
        SettingError: It is causal, declares another layout, or its ranks see parts of the keys.
    """
    if causal:
        raise SettingError(f"{_NAME} is set for causal attention, which blocks of keys cannot express; use another one")
    if qkv_layout is not None and qkv_layout.upper() != _LAYOUT:
        raise SettingError(
            f"{_NAME} is set for a layer that declares qkv_layout {qkv_layout!r}, expected {_LAYOUT!r}; use another one"
        )
    parallel = getattr(get_current_diffusion_config_or_none(), "parallel_config", None)
    for name in ("ring_degree", "allgather_degree"):
        degree = getattr(parallel, name, 1) or 1
        if degree > 1:
            raise SettingError(
                f"{name} is {degree}, expected 1 with {_NAME}, which chooses among all keys of a sequence; use "
                "ulysses_degree, or another attention backend"
            )


def _reason_to_leave_it_to_mindie(precision: str, config: Any, executor: str) -> str | None:
    """Say why vLLM-Omni's own implementation is taken on Ascend NPU, or None if ours is."""
    if not current_omni_platform.is_npu():
        return None
    # These are kernels of MindIE-SD with an order of their own.
    if precision != "bf16":
        return f"block_sparse.precision is {precision!r}"
    cache = getattr(config, "diffusion_kv_cache_dtype", None)
    if cache not in (None, "auto", "float"):
        return f"diffusion_kv_cache_dtype is {cache!r}"
    reason = why_not_mindie() if executor == "auto" else None
    return None if reason is None else f"found {reason}"


def _reason_never(sparsity: float, skipped: bool, qkv_layout: str | None) -> str | None:
    if sparsity <= 0:
        return "block_sparse.sparsity is 0"
    if skipped:
        return "skip_layers names this layer"
    if qkv_layout is None:
        return "the layer declares no qkv_layout"
    return None


def _reason_of_metadata(metadata: AttentionMetadata | None) -> str | None:
    if metadata is None or metadata.video_layout is None:
        return "the model tells of no video (video_layout) in the sequence"
    mask, layout = metadata.attn_mask, metadata.video_layout
    if metadata.full_attn_spans is not None:
        return "some rows see only parts of the sequence (full_attn_spans)"
    if mask is not None and not (layout.used_len is not None and mask.ndim == 2 and mask.dtype == torch.bool):
        return "the model masks more than padding"
    if metadata.extra.get("max_seqlen_q", layout.used_len) is None:
        return "the model does not tell how many rows are in use (max_seqlen_q)"
    if any(span.role not in ("reference", "target") for span in layout.video_spans):
        return "a video is neither reference nor target"
    if layout.video_spans and sum(span.role == "target" for span in layout.video_spans) != 1:
        return "not exactly one of the videos is the target"
    if not layout.video_spans and (layout.prefix_len is None or layout.latent_grid is None):
        return "the model tells of neither a video's grid nor its first row"
    return None


def _numbers(metadata: AttentionMetadata) -> list[int]:
    """Return what is known of a sequence as numbers: rows in use, rows that the layout claims, then each video's.

    Numbers, and not objects, are what a compiled graph can pass on without being compiled again for each.
    """
    layout = metadata.video_layout
    used = metadata.extra.get("max_seqlen_q", layout.used_len)
    if layout.video_spans:
        claimed = -1 if layout.used_len is None else layout.used_len
        spans: Iterable[tuple[int, Sequence[int]]] = [(span.start, span.latent_grid) for span in layout.video_spans]
    else:
        frames, height, width = layout.latent_grid
        claimed = layout.prefix_len + frames * height * width
        spans = [(layout.prefix_len, layout.latent_grid)]
    return [used, claimed, *(number for start, grid in spans for number in (start, *grid))]


@functools.lru_cache(maxsize=256)
def _read(numbers: tuple[int, ...]) -> tuple[Layout | None, str | None]:
    """Make a layout of what `_numbers` returned, or say why there is none."""
    used, claimed, *flat = numbers
    spans = [Span(flat[at], (flat[at + 1], flat[at + 2], flat[at + 3])) for at in range(0, len(flat), 4)]
    if used != claimed:
        return None, f"prefix and video take {claimed} rows, and the sequence has {used}"
    try:
        layout = Layout(used, tuple(sorted(spans, key=lambda span: (span.start, math.prod(span.grid)))))
        return layout, layout.reason_to_stay_dense()
    except ValueError as error:
        return None, str(error)


def _layer_index(prefix: str) -> int | None:
    try:
        index: int = extract_layer_index(prefix)
    except (AssertionError, ValueError):
        return None
    return index


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator] # said when a graph is traced, and no part of it
def _say_dense(reason: str | None) -> None:
    logger.info_once("%s stays dense: %s.", _NAME, reason)
