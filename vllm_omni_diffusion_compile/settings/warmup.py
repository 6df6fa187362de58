"""The mapping `warmup` of `diffusion_compile_config`: which requests the server answers before it says it is ready."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, model_validator

from vllm_omni_diffusion_compile.settings.lora import Lora

_SIZE = re.compile(r"([1-9]\d*)x([1-9]\d*)(?:x([1-9]\d*))?")
_EXPECTED_SHAPE = "expected WIDTHxHEIGHT, WIDTHxHEIGHTxFRAMES or a mapping of what the request states"


def _read_shape(value: object) -> object:
    """Turn `1344x768x209` into the mapping that it stands for."""
    if isinstance(value, (dict, Shape)):
        return value
    if not isinstance(value, str):
        raise ValueError(f"which is no shape; {_EXPECTED_SHAPE}")  # noqa: TRY004 - pydantic collects ValueErrors
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise ValueError(f"which is no shape; {_EXPECTED_SHAPE}")
    width, height, frames = match.groups()
    return {"width": int(width), "height": int(height)} | ({"frames": int(frames)} if frames else {})


def _read_shapes(value: object) -> object:
    """Turn the one text that a dotted flag gives into a list."""
    return value.split(",") if isinstance(value, str) else value


def _read_images(value: object) -> int | list[str]:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, list) and all(isinstance(size, str) and _is_size(size) for size in value):
        return value
    raise ValueError(
        "which is neither a count nor sizes; expected how many pictures, or a list of their sizes, WIDTHxHEIGHT each"
    )


def _is_size(text: str) -> bool:
    match = _SIZE.fullmatch(text)
    return match is not None and match.group(3) is None


class Shape(BaseModel):
    """One declared shape: a request that users send, as far as it decides what is compiled."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    width: int | None = Field(
        default=None,
        ge=1,
        description="Width of the picture, in pixels. Without width and height it is a request that states no size, "
        "which the model answers in its own.",
    )
    height: int | None = Field(default=None, ge=1, description="Height of the picture, in pixels.")
    frames: int | None = Field(default=None, ge=1, description="Frames of a video; unset for a picture.")
    steps: int | None = Field(
        default=None,
        ge=1,
        description="Denoise steps. They decide how long the warmup takes and hardly ever what is compiled, so unset "
        "they are as few as the model takes.",
    )
    guidance_scale: float | None = Field(
        default=None, description="As in the request; above 1 most models run with classifier-free guidance."
    )
    true_cfg_scale: float | None = Field(default=None, description="As in the request (Qwen-Image).")
    negative_prompt: str | None = Field(
        default=None,
        description="As in the request: some models run with classifier-free guidance only if it is there.",
    )
    images: Annotated[int | list[str], PlainValidator(_read_images)] = Field(
        default=0,
        description="Input pictures, for image to video and edits: how many of the request's own size, or their sizes.",
    )
    prompt_rows: int | None = Field(
        default=None,
        ge=1,
        description="Tokens of the prompt, where its length decides what is compiled. Unset, the prompt is a sentence.",
    )
    lora: Lora | None = Field(
        default=None,
        description="The LoRA adapter that the request names. Another one of as high a rank and of the same layers is "
        "served by the same graphs, at any scale.",
    )
    extra_args: dict[str, Any] = Field(default_factory=dict, description="The request's own `extra_args`.")

    @model_validator(mode="after")
    def _has_a_size_or_needs_none(self) -> Shape:
        if (self.width is None) != (self.height is None):
            missing = "width" if self.width is None else "height"
            raise ValueError(f"which has no {missing}; expected width and height, or neither for the model's own size")
        if self.width is None and isinstance(self.images, int) and self.images:
            raise ValueError(
                "which counts images and states no size, theirs or its own; expected a list of their sizes"
            )
        return self

    def __str__(self) -> str:
        size = self.size or "the model's own size"
        frames = f"x{self.frames}" if self.frames else ""
        named = self.model_dump(exclude_defaults=True, exclude={"width", "height", "frames"})
        if self.lora is not None:
            named["lora"] = str(self.lora)
        more = ", ".join(f"{name}={value}" for name, value in named.items())
        return f"{size}{frames}" + (f" ({more})" if more else "")

    @property
    def size(self) -> str | None:
        """`WIDTHxHEIGHT`; None if it states no size."""
        return None if self.width is None else f"{self.width}x{self.height}"

    @property
    def image_sizes(self) -> list[tuple[int, int]]:
        """Width and height of each input picture."""
        if isinstance(self.images, int):
            return [] if self.width is None or self.height is None else [(self.width, self.height)] * self.images
        sizes = [size.split("x") for size in self.images]
        return [(int(width), int(height)) for width, height in sizes]

    @property
    def without_lora(self) -> Shape:
        """The same request, naming no adapter."""
        return Shape(**self.model_dump(exclude_unset=True, exclude={"lora"}))


class WarmupConfig(BaseModel):
    """The keys of the mapping `warmup`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    shapes: Annotated[list[Annotated[Shape, BeforeValidator(_read_shape)]], BeforeValidator(_read_shapes)] = Field(
        default_factory=list,
        description="The requests to be warm for when the server is ready, each as `1024x1024`, as `1344x768x209` with "
        "frames, or as a mapping with `width`, `height`, `frames`, `steps`, `guidance_scale`, `true_cfg_scale`, "
        "`negative_prompt`, `images`, `prompt_rows`, `lora`, `extra_args`.",
        json_schema_extra={"values": "a list, or texts separated by commas"},
    )
    budget_s: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Seconds that warming up may take. A shape that would not fit any more is skipped, and one that "
        "takes longer is given up.",
        json_schema_extra={"values": "a number above 0, or unset"},
    )
    on_failure: Literal["serve", "fail"] = Field(
        default="serve",
        description="What follows when a declared shape fails, runs out of memory, or is skipped for the budget: "
        "`serve` says so and starts the server, `fail` ends the start with an error that names the shape.",
    )
    report_path: str | None = Field(
        default=None,
        description="File for the report on the start, as JSON; `vllm-omni-compile report` prints it. Shapes that are "
        "met later and were not declared are added to it.",
        json_schema_extra={"values": "a path, or unset"},
    )

    @model_validator(mode="after")
    def _one_adapter_for_each_id(self) -> WarmupConfig:
        paths: dict[int, str] = {}
        for lora in self.adapters:
            if lora.int_id is not None and paths.setdefault(lora.int_id, lora.path) != lora.path:
                raise ValueError(
                    f"shapes name two adapters with the lora.int_id {lora.int_id}, {paths[lora.int_id]!r} and "
                    f"{lora.path!r}, of which the second would not be loaded; give each its own, or none"
                )
        return self

    @property
    def warmed(self) -> list[Shape]:
        """The declared shapes, and after each that names an adapter the same without one.

        Beside an adapter there are requests without: where it is set at start, all that do not name it.
        """
        warmed: list[Shape] = []
        for shape in self.shapes:
            warmed.append(shape)
            if shape.lora is not None and (plain := shape.without_lora) not in (*self.shapes, *warmed):
                warmed.append(plain)
        return warmed

    @property
    def adapters(self) -> list[Lora]:
        """Each adapter that a shape names, once, in the order in which they are named."""
        return list(dict.fromkeys(shape.lora for shape in self.shapes if shape.lora is not None))
