"""One row of evidence: a combination, its state, and what the state rests on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from vllm_omni_diffusion_compile.errors import EvidenceError

State = Literal["validated", "failed", "rejected", "not tested"]
Seen = Literal["component", "latents", "artefact"]

# Policies that leave nothing to a measurement: decode has to be compiled.
COMPILED_DECODE = ("always", "blocks")

_Text = Annotated[str, Field(min_length=1)]
_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Count = Annotated[int, Field(ge=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Key(_Strict):
    """What a combination is. Two rows with the same key are about the same thing."""

    model: _Text = Field(description="Class of the pipeline, or of the component where `api_mode` is `component`.")
    task: _Text = Field(description="What is asked of it: `text-to-image`, `text-to-video`, `denoise`.")
    api_mode: Literal["component", "offline", "http"] = Field(
        description="How it was asked: a component called by itself, `Omni` in a program, or the server."
    )
    execution_mode: Literal["component", "request", "step"] = Field(
        description="What the worker executes at once: a whole request, or a step of it."
    )
    capacity: int = Field(ge=1, description="Requests that may run together: `max_num_seqs`.")
    shape: _Text = Field(description="`128x128`; `64x64, 107 frames`; of a component, the rows and widths.")
    schedule: _Text = Field(description="Scheduler and steps: `FlowMatchEulerDiscreteScheduler, 4 steps`.")
    attention_backend: _Text = Field(description="Name, and what decides its result: `RAINFUSION_ATTN, sparsity 0.5`.")
    packed_layout: _Text = Field(description="How rows of a packed sequence lie, or `none`.")
    cache_policy: _Text = Field(description="The cache of earlier steps: `cache_dit`, `tea_cache`, or `none`.")
    quantization: _Text = Field(description="Method and a hash of its options: `fp8 1c2d3e4f`; or `none`.")
    offload: _Text = Field(description="`cpu`, `layerwise`, or `none`.")
    topology: _Text = Field(description="`1 device`; `2 devices: ulysses 2`.")
    hardware: _Text = Field(description="As `evidence.hardware()` names it.")
    dtype: _Text = Field(description="Of weights and activations: `bfloat16`.")
    output_representation: _Text = Field(description="What comes out: `pixels uint8`, `latents float32`.")
    output_transport: _Text = Field(description="How it comes: `in process`, `PNG over HTTP`.")
    compiler: _Text = Field(description="Backend and mode: `inductor`, `inductor max-autotune-no-cudagraphs`, `none`.")
    compile_scope: Literal["eager", "regional", "full"] = Field(description="What of the transformer is compiled.")
    dynamic: bool | None = Field(description="Whether it is compiled for any shape; null where nothing is compiled.")
    vae_policy: Literal["off", "never", "measure", "always", "blocks"] = Field(
        description="Whether VAE decode is compiled: `vae_policy`, or `blocks` for `vae_scope: blocks`, or `off`."
    )
    bucket: int | None = Field(ge=1, description="Rows that the packed sequence was padded to; null without buckets.")

    @model_validator(mode="after")
    def _compiled_or_not(self) -> Key:
        if (self.compile_scope == "eager") != (self.dynamic is None):
            raise ValueError(f"compile_scope {self.compile_scope!r} does not go with dynamic {self.dynamic!r}")
        return self


class Figure(_Strict):
    """One number, and what it may be at most.

    Args:
        seen: What was compared: output of a component, latents after a denoise step, or the final artefact.
        name: Which: `transformer`, `step 2`, `picture`.
        measure: What the number is, in words: `largest difference from eager, of its scale`.
        value: The number; 0 is the same to the bit.
        bound: What it may be at most.
    """

    seen: Seen
    name: _Text
    measure: _Text
    value: float
    bound: float = Field(ge=0)

    @property
    def holds(self) -> bool:
        """Whether the number is within its bound."""
        return self.value <= self.bound


class Trace(_Strict):
    """What really ran, seen while it ran and not read from a configuration.

    Args:
        attention: Attention layers of the loaded model, by the class of what computes them.
        operators: Calls of operators and kernels that computed attention, as torch's profiler recorded them.
        compiled_calls: Calls of compiled code in the denoiser that the profiler recorded.
        decode_compiled_calls: The same in VAE decode; null in rows for which nobody looked.
        compiled_graphs: Graphs that were compiled until then.
        fallbacks: Calls that were answered eagerly because compiling or compiled code failed.
    """

    attention: dict[str, _Count]
    operators: dict[str, _Count]
    compiled_calls: _Count
    decode_compiled_calls: _Count | None = None
    compiled_graphs: _Count
    fallbacks: _Count


class Provenance(_Strict):
    """What somebody else needs to get the same row.

    Args:
        checkpoint: Name of the checkpoint; no path of the machine.
        checkpoint_revision: Its commit, or a hash of its files, or of how its random weights were made.
        vllm_omni: Version of vLLM-Omni; `none` only where `api_mode` is `component`.
        version: Version of this package.
        torch: Version of torch.
        command: What runs it again.
        settings: Keyword arguments that the model was loaded with.
        oracle: The same of the eager model on one device that it was compared with.
        request: The request, as plain values.
        request_sha256: `digest(request)`.
        assets: SHA-256 of each file that went into the request, by name; empty if none did.
        seed: Of the request.
        artefacts: SHA-256 of each raw artefact, by its path below the output folder of the command.
        environment: Facts of machine and process that the result may depend on.
        measured_on: The day, as YYYY-MM-DD.
    """

    checkpoint: _Text
    checkpoint_revision: _Text
    vllm_omni: _Text
    version: _Text
    torch: _Text
    command: _Text
    settings: dict[str, JsonValue]
    oracle: dict[str, JsonValue]
    request: dict[str, JsonValue]
    request_sha256: _Sha256
    assets: dict[str, _Sha256]
    seed: int
    artefacts: dict[str, _Sha256]
    environment: dict[str, str]
    measured_on: str = Field(pattern=r"^\d{4}-\d\d-\d\d$")

    @model_validator(mode="after")
    def _is_its_own_hash(self) -> Provenance:
        if self.request_sha256 != digest(self.request):
            raise ValueError(
                f"request_sha256 is {self.request_sha256}, but that of the request is {digest(self.request)}"
            )
        if not all(map(is_below, self.artefacts)):
            raise ValueError("artefacts are named by paths below the output folder of the command")
        if not all(map(is_below, self.assets)):
            raise ValueError("assets are named by paths below the working directory of the command")
        return self


class Row(_Strict):
    """One combination.

    Args:
        id: Names the row in documentation and on the command line.
        key: The combination.
        state: `validated`: it ran, and every figure is within its bound. `failed`: it ran, or should have, and did
            not hold. `rejected`: it is refused by design. `not tested`: it was declared, and could not run here.
        reason: Why it is not validated: the error of what is rejected, word for word.
        figures: What was compared.
        trace: What ran.
        provenance: What it takes to get the row again.
    """

    id: str = Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")
    key: Key
    state: State
    reason: str | None
    figures: tuple[Figure, ...]
    trace: Trace | None
    provenance: Provenance | None

    @model_validator(mode="after")
    def _is_what_it_says(self) -> Row:
        lacks = self._lacks()
        if lacks:
            raise ValueError(f"state is {self.state!r}, which needs {'; '.join(lacks)}")
        return self

    def _lacks(self) -> list[str]:
        """Name what the state asks for and the row does not have."""
        if self.state != "validated":
            lacks = [] if self.reason else ["a reason"]
            if self.state != "not tested" and self.provenance is None:
                lacks.append("provenance")
            return lacks
        lacks = ["no reason"] if self.reason else []
        lacks += [
            f"{item.name}: {item.value:g} to be at most {item.bound:g}" for item in self.figures if not item.holds
        ]
        wanted = get_args(Seen)[:1] if self.key.api_mode == "component" else get_args(Seen)
        lacks += [f"a figure of {what!r}" for what in wanted if what not in {item.seen for item in self.figures}]
        return lacks + self._lacks_of_run()

    def _lacks_of_run(self) -> list[str]:
        lacks = []
        if self.trace is None:
            lacks.append("a trace")
        else:
            if not self.trace.operators:
                lacks.append("the operators that computed attention")
            if self.key.compile_scope != "eager" and not self.trace.compiled_calls:
                lacks.append("calls of compiled code, for eager was compared with itself")
            if self.key.vae_policy in COMPILED_DECODE and self.trace.decode_compiled_calls == 0:
                lacks.append(f"calls of a compiled decode, since vae_policy is {self.key.vae_policy!r}")
            if self.trace.fallbacks:
                lacks.append("no fallbacks, for what they answered was eager")
        if self.provenance is None:
            lacks.append("provenance")
        else:
            if self.key.api_mode != "component" and self.provenance.checkpoint_revision in ("unknown", "not known"):
                lacks.append("the revision of its checkpoint")
            if not self.provenance.artefacts:
                lacks.append("artefacts")
            if not self.provenance.environment:
                lacks.append("an environment")
            if self.provenance.vllm_omni == "none" and self.key.api_mode != "component":
                lacks.append("a version of vLLM-Omni")
        return lacks


def make_row(  # noqa: PLR0913 - the parts of a row, by name
    id: str,  # noqa: A002 - the field's name
    key: Key | Mapping[str, Any],
    state: State,
    *,
    reason: str | None = None,
    figures: Iterable[Figure | Mapping[str, Any]] = (),
    trace: Trace | Mapping[str, Any] | None = None,
    provenance: Provenance | Mapping[str, Any] | None = None,
) -> Row:
    """Make a row from plain values.

    Args:
        id: As in `Row`: lower-case words and dashes.
        key: A mapping of every field of `Key`.
        state: As in `Row`.
        reason: Needed unless the state is `validated`.
        figures: Mappings of the fields of `Figure`.
        trace: A mapping of the fields of `Trace`.
        provenance: A mapping of the fields of `Provenance`; `request_sha256` is filled in where it is left out.

    Raises:
        EvidenceError: A field is missing, unknown or wrong, or the state asks for what is not there.
    """
    if isinstance(provenance, Mapping) and "request_sha256" not in provenance:
        provenance = {**provenance, "request_sha256": digest(provenance.get("request"))}
    given = {"key": key, "state": state, "reason": reason, "figures": tuple(figures), "trace": trace}
    try:
        return Row.model_validate({"id": id, **given, "provenance": provenance})
    except ValidationError as error:
        raise EvidenceError(f"row {id!r}: {explain(error)}") from None


def explain(error: ValidationError) -> str:
    """Say of each error in which field it is, and what was found there."""
    return "; ".join(
        f"{'.'.join(map(str, detail['loc'])) or 'row'}: "
        + ("field is missing" if detail["type"] == "missing" else _message(detail))
        for detail in error.errors(include_url=False)
    )


def _message(detail: Any) -> str:
    if detail["type"] == "extra_forbidden":
        return "no row has this field"
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    found = repr(detail["input"])
    return f"{detail['msg']}, found {found if len(found) <= 80 else found[:77] + '...'}"


def is_below(path: str) -> bool:
    """Whether a path says nothing of where on a machine something lies."""
    return not Path(path).is_absolute() and ".." not in Path(path).parts


def digest(value: object) -> str:
    """SHA-256 of plain values, written as JSON in one way only."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    content = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            content.update(block)
    return content.hexdigest()
