"""What cannot be had here, and how the user is told; a test that fails has become one of what works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.compose.engine import MARKS, Engine
from tests.serve.server import Server

pytestmark = MARKS


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        pytest.param({"max_num_seqs": 2}, ValueError, "does not support request-level batching", id="request-batches"),
        pytest.param({"step_execution": True}, ValueError, "does not support that contract", id="step-execution"),
        pytest.param({"enable_sleep_mode": True}, AssertionError, "cumem allocator is not available", id="sleep"),
        pytest.param({"quantization_config": "int8"}, NotImplementedError, "not supported int8 online", id="int8"),
        pytest.param({"quantization_config": "fp8"}, RuntimeError, "static_scaled_fp8_quant", id="fp8"),
        pytest.param(
            {"enable_layerwise_offload": True, "diffusion_compile_granularity": "full"},
            ValueError,
            "incompatible with",
            id="full-scope-under-offload",
        ),
    ],
)
def test_the_start_fails(klein: Path, options: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        Engine(klein, compiled=True, **options)


@pytest.mark.serve
def test_several_api_servers_are_refused(klein: Path) -> None:
    server = Server(klein, "--api-server-count", "2")
    with pytest.raises(RuntimeError, match="--api-server-count > 1 is not supported for diffusion models"):
        server.__enter__()
