"""The key `pad_seq_buckets`: the packed lengths that a MiniMax-H3 server pads its requests to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

ROW_ALIGN = 64
"""A packed length is a multiple of this many rows.

Source: `MINIMAX_H3_SEQ_ALIGN` of diffusion/models/minimax_h3/packed_sequence.py, 0.30.0; `_SEQ_ALIGN` in 0.28.0.
"""
MAX_ROWS = 1 << 20
"""The longest packed length.

Source: `MINIMAX_H3_MAX_PAD_SEQ_LEN` of the same file, 0.30.0.
"""


def aligned(rows: int) -> int:
    """Return the shortest packed length that holds a number of rows."""
    return -(-rows // ROW_ALIGN) * ROW_ALIGN


def fewest_lengths(shortest: int, longest: int, waste: float) -> list[int]:
    """Return the fewest packed lengths that hold every number of rows in a range without wasting more than a share.

    Each length is as long as the shortest request that it is for allows: any other choice needs at least as many.

    Args:
        shortest: First number of rows of the range.
        longest: Last one.
        waste: The share of a packed length that may be padding, between 0 and 1.

    Raises:
        ValueError: Even the next multiple of 64 wastes more.
    """
    # As it was typed: the binary fraction next to 0.06 is not 0.06, and a length on the border would be lost.
    kept = 1 - Fraction(repr(float(waste)))
    lengths: list[int] = []
    rows = shortest
    while True:
        length = int(rows / kept) // ROW_ALIGN * ROW_ALIGN
        if length < rows:
            least = (aligned(rows) - rows) / aligned(rows)
            raise ValueError(
                f"which cannot be kept: the shortest packed length for {rows} row(s) is {aligned(rows)}, and "
                f"{least:.4f} of that is padding; raise waste, or from"
            )
        if length >= longest:
            return [*lengths, aligned(longest)]
        lengths.append(length)
        rows = length + 1


def _packed_length(length: int) -> int:
    if length <= 0:
        raise ValueError(f"expected a positive multiple of {ROW_ALIGN}")
    if length > MAX_ROWS:
        raise ValueError(f"expected at most {MAX_ROWS} rows")
    if length % ROW_ALIGN:
        below, above = length // ROW_ALIGN * ROW_ALIGN, aligned(length)
        raise ValueError(f"expected a multiple of {ROW_ALIGN}, such as {f'{below} or ' if below else ''}{above}")
    return length


_RULE = ("from", "to", "waste")


class PadSeqBuckets(BaseModel):
    """Packed lengths, listed or as a rule; a plain list is short for `lengths`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    lengths: list[Annotated[int, AfterValidator(_packed_length)]] | None = Field(
        default=None,
        min_length=1,
        description=f"The lengths themselves, in rows: multiples of {ROW_ALIGN}, at most {MAX_ROWS}. Takes the place "
        "of `from`, `to` and `waste`.",
        json_schema_extra={"values": f"a list of multiples of {ROW_ALIGN}, or unset"},
    )
    from_: int | None = Field(
        default=None,
        alias="from",
        ge=1,
        le=MAX_ROWS,
        description="The fewest rows that a request uses; with `to` and `waste` it stands for the fewest lengths that "
        "keep the rule.",
        json_schema_extra={"values": "a whole number, or unset"},
    )
    to: int | None = Field(
        default=None,
        ge=1,
        le=MAX_ROWS,
        description="The most rows that a request uses.",
        json_schema_extra={"values": "a whole number, or unset"},
    )
    waste: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="The share of a packed length that may be padding, for any number of rows from `from` to `to`.",
        json_schema_extra={"values": "a number between 0 and 1, or unset"},
    )
    over: Literal["round", "reject"] = Field(
        default="round",
        description="What becomes of a request that no length holds: `round` pads it to the next multiple of "
        f"{ROW_ALIGN}, as without buckets, and the log says once which length to add; `reject` answers 413.",
    )

    @property
    def rows(self) -> tuple[int, ...]:
        """The packed lengths, ascending."""
        if self.lengths is not None:
            return tuple(sorted(self.lengths))
        return tuple(fewest_lengths(*self._rule))

    @property
    def _rule(self) -> tuple[int, int, float]:
        if self.from_ is None or self.to is None or self.waste is None:
            raise ValueError("which is a list, and has no rule")
        return self.from_, self.to, self.waste

    @model_validator(mode="before")
    @classmethod
    def _list_is_lengths(cls, given: Any) -> Any:
        if isinstance(given, (list, tuple)):
            return {"lengths": list(given)}
        if not isinstance(given, (Mapping, cls)):
            raise ValueError(  # noqa: TRY004 - pydantic names the place of a ValueError, and not of a TypeError
                f"expected a list of multiples of {ROW_ALIGN} such as [16384, 32768], or a mapping with lengths, or "
                "with from, to and waste"
            )
        return given

    @model_validator(mode="after")
    def _listed_or_by_rule(self) -> PadSeqBuckets:
        rule = dict(zip(_RULE, (self.from_, self.to, self.waste), strict=True))
        given = [name for name, value in rule.items() if value is not None]
        if self.lengths is not None:
            if given:
                raise ValueError(f"which has both lengths and {', '.join(given)}; leave one of the two out")
            twice = next((length for length, times in Counter(self.lengths).items() if times > 1), None)
            if twice is not None:
                raise ValueError(f"in which {twice} stands more than once; expected each length once")
        elif len(given) < len(rule):
            missing = ", ".join(name for name in rule if name not in given)
            raise ValueError(f"which lacks {missing}; expected lengths, or all of from, to and waste")
        else:
            shortest, longest, waste = self._rule
            if shortest > longest:
                raise ValueError(f"whose from, {shortest}, is more than its to, {longest}")
            fewest_lengths(shortest, longest, waste)
        return self

    @model_serializer(mode="wrap")
    def _as_given(self, serialize: SerializerFunctionWrapHandler) -> Any:
        if self.model_fields_set == {"lengths"}:
            return list(self.lengths or ())
        return {name.rstrip("_"): value for name, value in serialize(self).items()}
