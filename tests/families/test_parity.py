"""A component computes the same thing however it is compiled."""

from __future__ import annotations

import logging

import pytest

from tools.model_families.families import FAMILIES
from tools.model_families.parity import Way, compare, ways
from vllm_omni_diffusion_compile.upstream import activation

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    # torch's and the host's remarks on graphs that could be faster.
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]

BY_NAME = {family.name: family for family in FAMILIES}


@pytest.fixture(autouse=True)
def ours() -> None:
    """With our grafts, whatever another test has undone."""
    activation.activate()
    logging.getLogger("torch").setLevel(logging.WARNING)


# Declared blocks of two classes; a list of images; video; one that declares no blocks; a dotted component that declares
# none and runs in bf16 only; and blocks whose own parts are called.
@pytest.mark.parametrize("name", ["flux2_klein", "z_image", "wan2_2", "auk", "bagel", "pi0"])
def test_outputs_agree(name: str) -> None:
    family = BY_NAME[name]
    # The first data type is enough where no code is generated.
    for result in compare(family, ways("aot_eager"), dtypes=family.dtypes[:1], sizes=(1, 2)):
        assert result.holds, result


# Generated code, where it takes seconds and not minutes to make.
@pytest.mark.parametrize(
    ("name", "scope", "dynamic"),
    [("flux2_klein", "regional", True), ("auk", "regional", False), ("auk", "full", True)],
)
def test_outputs_agree_with_inductor(name: str, scope: str, dynamic: bool) -> None:
    way = Way(scope=scope, dynamic=dynamic, backend="inductor")
    for result in compare(BY_NAME[name], [way], sizes=(1, 2)):
        assert result.holds, result
