"""The keys of the mapping `diffusion_compile_config`."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from vllm_omni_diffusion_compile.settings.pad_seq_buckets import PadSeqBuckets
from vllm_omni_diffusion_compile.settings.warmup import WarmupConfig

# Backends to which `mode` means something.
_INDUCTOR = ("auto", "inductor")
_CUDA_GRAPHS = "CUDA graphs, whose outputs live in buffers that the next call overwrites"
_IDENTIFIER = r"[A-Za-z_]\w*"
_DOTTED = rf"{_IDENTIFIER}(\.{_IDENTIFIER})*"
_BACKEND = re.compile(rf"[A-Za-z_][\w-]*|{_DOTTED}:{_DOTTED}|{_DOTTED}\.{_IDENTIFIER}")

# Compilations of one region before torch gives up on it. Torch allows 8, which 8 image sizes use up with static shapes.
STATIC_RECOMPILE_LIMIT = 64
# And for each declared shape: guidance with a negative prompt of another length, first and later steps, one to spare.
RECOMPILATIONS_PER_SHAPE = 4


class DiffusionCompileConfig(BaseModel):
    """How the compiler is used: the keys of the mapping `diffusion_compile_config`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    backend: str = Field(
        default="auto",
        description="The compiler. `auto` is `inductor` where the platform supports it; elsewhere nothing is "
        "compiled. A name that torch.compile knows, or a dotted path (`package.module:callable` or "
        "`package.module.callable`) to a backend of your own; a class is called without arguments to make one. If a "
        "backend that is named is not there, the worker does not start. `cudagraphs` is refused, for the reason given "
        "at `mode`.",
        json_schema_extra={"values": "`auto`, `inductor`, another name that torch.compile knows, or a dotted path"},
    )
    mode: Literal["default", "max-autotune-no-cudagraphs"] = Field(
        default="default",
        description="Inductor's mode. `max-autotune-no-cudagraphs` measures several kernels for each operation: it "
        f"takes longer to compile. `reduce-overhead` and `max-autotune` are refused: they use {_CUDA_GRAPHS}. Refused "
        "too with a backend other than `auto` and `inductor`, which has no such modes.",
    )
    on_failure: Literal["eager", "raise"] = Field(
        default="eager",
        description="What follows when compiling fails: `eager` runs the region without the compiler from then on and "
        "answers the request; `raise` fails it. The same holds where what computes `RAINFUSION_ATTN` fails: `eager` "
        "stands for dense attention there.",
    )
    infer_regions: bool = Field(
        default=True,
        description="Whether repeated blocks are looked for in the structure of a model that declares none.",
    )
    recompile_limit: int | None = Field(
        default=None,
        ge=1,
        description="How often one region may be compiled before torch runs it without the compiler; components of one "
        "class share it. Unset, it is "
        "torch's own limit, and with `diffusion_compile_dynamic` off, where every shape is compiled by itself, "
        f"{STATIC_RECOMPILE_LIMIT}, or {RECOMPILATIONS_PER_SHAPE} for each declared shape if that is more. Where "
        "shapes name several adapters, it makes room for each.",
        json_schema_extra={"values": "a whole number of at least 1, or unset"},
    )
    warmup: WarmupConfig = Field(
        default_factory=WarmupConfig,
        description="Which requests are answered before the server says it is ready, and what becomes of the report on "
        "that. Without shapes, the sizes that vLLM-Omni's own dummy run and this package choose.",
    )

    vae_policy: Literal["measure", "always", "never"] = Field(
        default="measure",
        description="Whether VAE decode is compiled, where `diffusion_compile_vae` is on: `measure` times eager and "
        "compiled decode side by side on the shapes that are warmed up, and keeps the faster; `always` keeps the "
        "compiled one; `never` compiles none, and warms up all the same.",
    )
    vae_scope: Literal["decode", "blocks"] = Field(
        default="decode",
        description="What of a VAE is compiled: `decode`, or the repeated `blocks` of its decoder, which also reaches "
        "VAEs that the pipeline does not call by `decode`. Blocks are not measured against eager.",
    )
    cache_dir: str | Literal[False] | None = Field(
        default=None,
        description="Where compiled artifacts are kept, for the next start to begin with. Unset, it is "
        "`diffusion_compile` within vLLM's own cache (`VLLM_CACHE_ROOT`); `false` keeps nothing. A directory that "
        "others can write is not used, since artifacts are code. Where `TORCHINDUCTOR_CACHE_DIR` is set, torch's own "
        "cache is used as it is; `VLLM_DISABLE_COMPILE_CACHE=1` switches this one off.",
        json_schema_extra={"values": "a directory, `false`, or unset"},
    )

    rainfusion_executor: Literal["auto", "flash", "flex", "mindie", "reference"] = Field(
        default="auto",
        description="What computes the attention backend `RAINFUSION_ATTN`. `auto` is the fastest that runs on the "
        "device: `flash` (FlashAttention-4, on Hopper with vLLM-Omni's extra `fa4`), `flex` (FlexAttention, on CUDA "
        "and CPU) or `mindie` (MindIE-SD, on Ascend NPU); it also leaves attention dense where sparse attention is not "
        "expected to be faster. `reference` is slow and for comparison.",
    )

    pad_seq_buckets: PadSeqBuckets | None = Field(
        default=None,
        description="MiniMax-H3 alone: the packed lengths, in rows, that requests are padded to. A request that does "
        "not pin its own gets the shortest one that holds it, so that no more lengths are compiled than are listed. "
        "Either a list, or a mapping of the keys below. Unset, each request is padded to the next multiple of 64.",
        json_schema_extra={"values": "a list of multiples of 64, a mapping of the keys below, or unset"},
    )

    require_evidence: str | None = Field(
        default=None,
        min_length=1,
        description="A file of rows that `vllm-omni-compile qualify` wrote, or a folder of such files. A worker then "
        "refuses to start, before it loads weights, unless there is a validated row of the same model, checkpoint, "
        "scope, dynamic, VAE policy, backend and mode, attention backend with its options, cache, quantization, "
        "offload, topology, execution mode, capacity, data type, hardware, and versions of vLLM-Omni, torch and this "
        "package; with `pad_seq_buckets`, one for each bucket. What requests decide (task, shape, schedule, output) is "
        "not compared.",
        json_schema_extra={"values": "a path, or unset"},
    )

    @property
    def needs_inductor(self) -> bool:
        """Whether nothing is compiled where the platform has no inductor."""
        return self.backend in _INDUCTOR

    @field_validator("backend")
    @classmethod
    def _well_formed(cls, backend: str) -> str:
        if backend == "cudagraphs":
            raise ValueError(f"which uses {_CUDA_GRAPHS}; use 'inductor'")
        if not _BACKEND.fullmatch(backend):
            raise ValueError(
                "which is neither a name nor a dotted path; expected 'auto', 'inductor', another name that "
                "torch.compile knows, or 'package.module:callable'"
            )
        return backend

    @field_validator("cache_dir", mode="before")
    @classmethod
    def _a_directory(cls, cache_dir: object) -> object:
        if cache_dir is None or cache_dir is False or (isinstance(cache_dir, str) and cache_dir.strip()):
            return cache_dir
        raise ValueError("expected a directory, or false to keep nothing; leave it out for the default")

    @field_validator("mode", mode="before")
    @classmethod
    def _without_cuda_graphs(cls, mode: object) -> object:
        if mode in ("reduce-overhead", "max-autotune"):
            raise ValueError(f"which uses {_CUDA_GRAPHS}; use 'max-autotune-no-cudagraphs'")
        return mode

    @model_validator(mode="after")
    def _modes_are_inductors(self) -> DiffusionCompileConfig:
        if self.mode != "default" and self.backend not in _INDUCTOR:
            raise ValueError(
                f"mode is {self.mode!r} and backend is {self.backend!r}, but only inductor has modes; leave mode out, "
                "or use the backend 'inductor'"
            )
        return self
