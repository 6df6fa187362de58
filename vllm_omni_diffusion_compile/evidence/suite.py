"""A declared list of combinations: which models, with which settings, are asked what."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from vllm_omni_diffusion_compile.errors import EvidenceError
from vllm_omni_diffusion_compile.evidence.row import Row, explain, file_digest, is_below

# Settings that only say how the same result is computed: the oracle does without them.
_HOW = frozenset(
    "diffusion_compile_granularity diffusion_compile_dynamic diffusion_compile_vae diffusion_compile_config "
    "enforce_eager num_gpus parallel_config tensor_parallel_size ulysses_degree ring_degree allgather_degree "
    "cfg_parallel_size pipeline_parallel_size data_parallel_size vae_patch_parallel_size text_encoder_tp_size use_hsdp "
    "enable_cpu_offload enable_layerwise_offload enable_distributed_layerwise_offload diffusion_offload_config "
    "distributed_executor_backend step_execution max_num_seqs".split()
)
_EXECUTOR = "rainfusion_executor"
_OVER_HTTP = "text-to-image"

Api = Literal["offline", "http"]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Model(_Strict):
    """A model, and what its combinations have in common.

    Args:
        checkpoint: Folder or name of the checkpoint.
        made_by: The command that writes the checkpoint where it is not there.
        task: As in a row's key.
        settings: Keyword arguments of `Omni`.
        request: `prompt`, `negative_prompt`, `images` (files, from the working directory), `seed`, and further fields
            of `OmniDiffusionSamplingParams`.
    """

    checkpoint: str = Field(min_length=1)
    made_by: str = ""
    task: str = Field(min_length=1)
    settings: dict[str, JsonValue] = Field(default_factory=dict)
    request: dict[str, JsonValue]


class Combination(_Strict):
    """One combination.

    Args:
        id: Of its row.
        model: Its name in `models`.
        settings: Over those of the model, key by key.
        request: Over that of the model, key by key.
        devices: How many it needs; where there are fewer, it is not tested.
        refused: What the error says where it is refused by design; empty where it is not.
        api: How it is asked: by a program with `Omni`, or over HTTP of a server. The oracle is a program in both.
        takes_s: About how long it takes: of several that run at once, those that take longest begin.
    """

    id: str = Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")
    model: str
    settings: dict[str, JsonValue] = Field(default_factory=dict)
    request: dict[str, JsonValue] = Field(default_factory=dict)
    devices: int = Field(default=1, ge=1)
    refused: str = ""
    api: Api = "offline"
    takes_s: float = Field(default=0.0, ge=0)


class Suite(_Strict):
    """What a file of combinations holds.

    Args:
        timeout_s: What one model may take to start and to answer.
        models: By name.
        combinations: In the order in which they are run.
    """

    timeout_s: float = Field(default=1800.0, gt=0)
    models: dict[str, Model]
    combinations: list[Combination] = Field(min_length=1)

    @model_validator(mode="after")
    def _all_known(self) -> Suite:
        for combination in self.combinations:
            if combination.model not in self.models:
                known = ", ".join(self.models)
                raise ValueError(f"{combination.id}: model is {combination.model!r}, expected one of: {known}")
            task = self.models[combination.model].task
            if combination.api == "http" and task != _OVER_HTTP:
                raise ValueError(
                    f"{combination.id}: api (--api) is 'http' and task is {task!r}, expected {_OVER_HTTP!r}: "
                    "pictures come as PNG, and what encodes a video loses more than what is looked for"
                )
            request = self.declared(combination).request
            images = request.get("images", [])
            if not isinstance(images, list) or not all(isinstance(file, str) and is_below(file) for file in images):
                raise ValueError(
                    f"{combination.id}: request.images is {images!r}, expected a list of files, "
                    "named by their paths below the working directory"
                )
            if combination.api == "http" and images:
                raise ValueError(
                    f"{combination.id}: api (--api) is 'http' and request.images is {images!r}: "
                    "the endpoint takes none; leave one of them out"
                )
            seed = request.get("seed")
            if not isinstance(seed, int) or isinstance(seed, bool):
                raise ValueError(  # noqa: TRY004 - what pydantic makes an error of the suite
                    f"{combination.id}: request.seed is {seed!r}, expected a whole number"
                )
        names = [combination.id for combination in self.combinations]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"{', '.join(twice)} stands twice among the combinations; each needs an id of its own")
        return self

    def declared(self, combination: Combination) -> Declared:
        """Put a combination and its model together."""
        model = self.models[combination.model]
        return Declared(
            id=combination.id,
            checkpoint=model.checkpoint,
            made_by=model.made_by,
            task=model.task,
            settings=_merged(model.settings, combination.settings),
            request=_merged(model.request, combination.request),
            devices=combination.devices,
            refused=combination.refused,
            api=combination.api,
            takes_s=combination.takes_s,
        )


class Declared(_Strict):
    """A combination with everything that it takes to run it; see `Combination` and `Model`."""

    id: str
    checkpoint: str
    made_by: str = ""
    task: str
    settings: dict[str, JsonValue]
    request: dict[str, JsonValue]
    devices: int = 1
    refused: str = ""
    api: Api = "offline"
    takes_s: float = 0.0

    @property
    def images(self) -> list[str]:
        """Files that go into the request."""
        images = self.request.get("images")
        return [str(file) for file in images] if isinstance(images, list) else []

    @property
    def oracle(self) -> dict[str, JsonValue]:
        """Settings of the eager model on one device that has to have the same result.

        What is meant to change the result stays: attention, cache, quantization, data type.
        """
        kept: dict[str, JsonValue] = {name: value for name, value in self.settings.items() if name not in _HOW}
        config = self.settings.get("diffusion_compile_config")
        if isinstance(config, Mapping) and _EXECUTOR in config:
            kept["diffusion_compile_config"] = {_EXECUTOR: "reference"}
        return {**kept, "enforce_eager": True}


def again(row: Row) -> Declared:
    """Return the combination of a row, to be run again.

    Raises:
        EvidenceError: The row does not say how it was run, or a picture of its request is another one now.
    """
    if row.provenance is None:
        raise EvidenceError(f"row {row.id!r} is {row.state!r} and does not say how to run it; declare it in a suite")
    for name, known in row.provenance.assets.items():
        if Path(name).is_file() and file_digest(Path(name)) != known:
            raise EvidenceError(
                f"row {row.id!r}: request.images: {name} is another picture than that of the row, "
                f"whose SHA-256 is {known}"
            )
    return Declared(
        id=row.id,
        checkpoint=row.provenance.checkpoint,
        task=row.key.task,
        settings=row.provenance.settings,
        request=row.provenance.request,
        refused=row.reason or "" if row.state == "rejected" else "",
        api="http" if row.key.api_mode == "http" else "offline",
    )


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    both = base.keys() & over.keys()
    deep = {n: _merged(base[n], over[n]) for n in both if isinstance(base[n], Mapping) and isinstance(over[n], Mapping)}
    return {**base, **over, **deep}


def built_in() -> list[str]:
    """Names of the suites that come with the package."""
    folder = resources.files(__package__) / "suites"
    return sorted(file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml"))


def read_suite(named: str) -> Suite:
    """Read a suite: the name of a built-in one, or a YAML file.

    Raises:
        EvidenceError: There is none, or it is none.
    """
    if named in built_in():
        text = (resources.files(__package__) / "suites" / f"{named}.yaml").read_text(encoding="utf-8")
    else:
        try:
            text = Path(named).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            known = ", ".join(built_in())
            raise EvidenceError(f"{named} cannot be read ({error}); expected a YAML file, or one of: {known}") from None
    try:
        return Suite.model_validate(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise EvidenceError(f"{named} is no YAML: {error}") from None
    except ValidationError as error:
        raise EvidenceError(f"{named}: {explain(error)}") from None
