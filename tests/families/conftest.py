"""The installed vLLM-Omni with our plugin registered, as vLLM registers it."""

from __future__ import annotations

import pytest
import torch
import vllm_omni

from vllm_omni_diffusion_compile.plugin import register

register()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave other releases out: the families are those of one."""
    for item in items:
        if "families" in item.path.parts and not vllm_omni.__version__.startswith("0.30."):
            item.add_marker(pytest.mark.skip(reason="the model families are those of vLLM-Omni 0.30"))


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tests run two abreast, and the models are so small that threads only wait for each other."""
    torch.set_num_threads(1)
