"""The table over the model families of the installed release."""

from __future__ import annotations

import pytest
from vllm_omni.diffusion import registry

from tools.model_families.families import FAMILIES, NOT_BUILT
from tools.model_families.family import Family
from tools.model_families.stand_in import host_class

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BY_NAME = {family.name: family for family in FAMILIES}


def test_no_family_of_the_release_is_missing() -> None:
    folders = {folder for folder, _, _ in registry._DIFFUSION_MODELS.values()}
    assert folders - set(BY_NAME) - {missing.name for missing in NOT_BUILT} == set()


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.pipeline], ids=lambda family: family.name)
def test_a_stand_in_holds_its_component_where_the_pipeline_declares_it(family: Family) -> None:
    declared = family.dit_modules or getattr(host_class(family.pipeline), "_dit_modules", None)
    if not declared:
        return  # the runner then tries `transformer`, and no path is right or wrong
    places = {family.path, *family.also}
    assert any(path == place or path.startswith(f"{place}.") for path in declared for place in places)
