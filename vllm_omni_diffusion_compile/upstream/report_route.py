"""The report on the start, from the server itself: `GET /v1/diffusion_compile/report`."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from vllm_omni_diffusion_compile.errors import DiffusionCompileError
from vllm_omni_diffusion_compile.settings import CONFIG, read_config
from vllm_omni_diffusion_compile.upstream import reporting
from vllm_omni_diffusion_compile.warmup.report import ROUTE

_NONE = (
    "there is no report: the stage is in a process of its own and diffusion_compile_config.warmup.report_path is not "
    "set on the command line, or no shape was declared"
)


def with_report_route(router: Any) -> Any:
    """A copy of the host's router that has our route, too; below /v1, where an API key is asked for if there is one."""
    from fastapi import APIRouter

    ours = APIRouter()
    ours.add_api_route(ROUTE, _handler(), methods=["GET"], tags=["diffusion compile"])
    both = copy.copy(router)
    both.routes = [*router.routes, *ours.routes]
    return both


def _handler() -> Any:
    from fastapi import Request
    from fastapi.responses import JSONResponse

    def report(raw_request: Request) -> JSONResponse:
        found = reporting.latest() or _written(raw_request.app.state)
        if found is None:
            return JSONResponse({"error": {"message": _NONE, "type": "NotFoundError", "code": 404}}, status_code=404)
        return JSONResponse(found)

    # FastAPI evaluates the texts that they are here, in this module, which does not import what they name.
    report.__annotations__ = {"raw_request": Request, "return": JSONResponse}
    return report


def _written(state: Any) -> Any:
    """What a stage in another process wrote; None if it wrote nothing."""
    try:
        config = read_config(getattr(getattr(state, "args", None), CONFIG, None))
        path = config.warmup.report_path
        return None if path is None else json.loads(Path(path).expanduser().read_text())
    except (OSError, ValueError, DiffusionCompileError):
        return None
