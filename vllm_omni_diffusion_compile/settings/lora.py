"""The key `lora` of a declared shape: the adapter that a request names."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator


class Lora(BaseModel):
    """A LoRA adapter, under the names that the field `lora` of a request has for it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    path: str = Field(min_length=1, description="Folder, file or Hugging Face repository of the adapter.")
    name: str | None = Field(
        default=None, min_length=1, description="As in the request; unset, it is the last part of the path."
    )
    scale: float = Field(default=1.0, allow_inf_nan=False, description="As in the request; compiles nothing by itself.")
    int_id: int | None = Field(
        default=None, ge=1, description="As in the request; unset, vLLM-Omni derives it from the path."
    )

    @field_validator("scale")
    @classmethod
    def _not_zero(cls, scale: float) -> float:
        if scale == 0:
            raise ValueError("which switches the adapter off; leave lora out of the shape, or scale out for 1.0")
        return scale

    def __str__(self) -> str:
        return self.name or self.path

    @property
    def as_request(self) -> dict[str, Any]:
        """The field `lora` of a request, which does not do without a name."""
        said = self.model_dump(exclude_unset=True, exclude_none=True)
        return {"name": self.path.rstrip("/").rpartition("/")[2] or self.path} | said
