"""Whether two runs of the same request agree, as figures with bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_omni_diffusion_compile.errors import EvidenceError
from vllm_omni_diffusion_compile.evidence.row import Figure, Seen

Arrays = Mapping[str, NDArray[Any]]

# fp32: arithmetic in another order.
FP32_OF_SCALE = 1e-4
# bf16: as near to fp32 as eager bf16 is, but for chance. For a component that was given the same, and for latents over
# all calls of the denoiser.
BF16_OF_EAGER = 1.5
# For what one call was given or decoding gave: errors of earlier steps are carried along together, so that it is chance
# of few numbers, in the oracle as well.
BF16_CARRIED = 2.0
# Pixels are rounded, so that what lies at the edge of two levels may fall to either.
LEVELS = 1.0
# The oracle computes this in fp32 itself, if it is nearer than this to the reference.
_EXACT = 1e-6
_TINY = float(np.finfo(np.float64).tiny)

_OF_SCALE = "largest difference from the oracle, of its largest value"
_OF_EAGER = "distance from the oracle in fp32, of the eager oracle's own distance"
_IN_LEVELS = "largest difference from the oracle, in levels of 0 to 255"


def figures(subject: Arrays, oracle: Arrays, reference: Arrays | None, *, same: bool = False) -> list[Figure]:
    """Compare everything that was seen of two runs.

    Args:
        subject: Arrays by name, as `upstream/observe.py` names them: `component/...`, `latents/...`, `artefact ...`.
        oracle: The same of the oracle.
        reference: The same of the oracle in fp32; None if the oracle computes in fp32.
        same: Whether nothing but a repetition is expected: every bound is 0.

    Raises:
        EvidenceError: They saw different things.
    """
    if subject.keys() != oracle.keys() or (reference is not None and reference.keys() != oracle.keys()):
        odd = sorted(subject.keys() ^ oracle.keys() | (reference or oracle).keys() ^ oracle.keys())
        raise EvidenceError(f"not seen in all runs: {', '.join(odd)}; they did not do the same")
    exact = oracle if reference is None else reference
    found = [
        figure(
            _seen(name), name.partition("/")[2] or name, subject[name], oracle[name],
            None if reference is None else exact[name], same=same, carried=_carried(name, oracle),
        )
        for name in oracle
    ]  # fmt: skip
    if reference is not None and not same:
        found += _over_all_calls(subject, oracle, reference)
    return found


def figure(  # noqa: PLR0913 - what is compared, by name
    seen: Seen,
    name: str,
    subject: NDArray[Any],
    oracle: NDArray[Any],
    reference: NDArray[Any] | None = None,
    *,
    same: bool = False,
    carried: bool = False,
) -> Figure:
    """Compare one array.

    Args:
        seen: What it is.
        name: What it is called.
        subject: The array.
        oracle: That of the oracle, of the same shape, but for rows of zeros that a packed sequence is padded with.
        reference: That of the oracle in fp32; None if the oracle computes in fp32.
        same: Whether the bound is 0.
        carried: Whether errors of earlier denoise steps are in it.

    Raises:
        EvidenceError: The shapes differ.
    """
    subject = _unpadded(subject, oracle)
    if subject.shape != oracle.shape or (reference is not None and reference.shape != oracle.shape):
        raise EvidenceError(
            f"{name}: shape {subject.shape}, and {oracle.shape} of the oracle; they did not do the same"
        )
    measure, value, bound = _distance(subject, oracle, reference)
    if carried and measure == _OF_EAGER:
        bound = BF16_CARRIED
    if same:
        measure, value = (measure, value) if measure != _OF_EAGER else (_OF_SCALE, _of_scale(subject, oracle))
        bound = 0.0
    if not np.isfinite(value):
        raise EvidenceError(f"{name}: holds values that are no numbers")
    return Figure(seen=seen, name=name, measure=measure, value=value, bound=bound)


def _carried(name: str, oracle: Arrays) -> bool:
    return _seen(name) != "component" or f"latents/decoded by {name.removeprefix('component/')}" in oracle


def _over_all_calls(subject: Arrays, oracle: Arrays, reference: Arrays) -> list[Figure]:
    """Compare latents of all calls at once, each call of the same weight; none where the oracle is exact."""
    of_subject = of_oracle = 0.0
    for name in (name for name in oracle if _seen(name) == "latents"):
        exact = reference[name].astype(np.float64)
        scale = max(float(np.linalg.norm(exact)), _TINY)
        of_subject += (float(np.linalg.norm(_unpadded(subject[name], oracle[name]) - exact)) / scale) ** 2
        of_oracle += (float(np.linalg.norm(oracle[name] - exact)) / scale) ** 2
    if of_oracle <= _EXACT**2:
        return []
    value = (of_subject / of_oracle) ** 0.5
    return [Figure(seen="latents", name="all calls", measure=_OF_EAGER, value=value, bound=BF16_OF_EAGER)]


def _unpadded(subject: NDArray[Any], oracle: NDArray[Any]) -> NDArray[Any]:
    """Cut rows off that the oracle's packed sequence ([1, rows, width]) does not have, if they are zeros."""
    if subject.ndim != 3 or oracle.ndim != 3 or subject[:, oracle.shape[1] :].any():
        return subject
    return subject[:, : oracle.shape[1]]


def _seen(name: str) -> Seen:
    kind = name.partition("/")[0]
    return "component" if kind == "component" else "latents" if kind == "latents" else "artefact"


def _distance(subject: NDArray[Any], oracle: NDArray[Any], reference: NDArray[Any] | None) -> tuple[str, float, float]:
    if reference is not None:
        exact = reference.astype(np.float64)
        eager = float(np.linalg.norm(oracle - exact))
        if eager > _EXACT * float(np.linalg.norm(exact)):
            return _OF_EAGER, float(np.linalg.norm(subject - exact)) / eager, BF16_OF_EAGER
    if oracle.dtype == np.uint8:
        levels = np.abs(subject.astype(np.int16) - oracle.astype(np.int16))
        return _IN_LEVELS, float(levels.max(initial=0)), LEVELS
    return _OF_SCALE, _of_scale(subject, oracle), FP32_OF_SCALE


def _of_scale(subject: NDArray[Any], oracle: NDArray[Any]) -> float:
    exact = oracle.astype(np.float64)
    difference = float(np.abs(subject - exact).max(initial=0.0))
    return difference and difference / max(float(np.abs(exact).max(initial=0.0)), _TINY)
