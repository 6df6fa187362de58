"""One arm of a comparison, as a user has it: `vllm serve`, and one request over HTTP.

Components and latents are seen as in `arm`: `vllm serve` takes a worker extension too, and vLLM's development mode has
a route that calls its methods.
"""

from __future__ import annotations

import base64
import io
import json
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm_omni_diffusion_compile.bench.arms import as_flags
from vllm_omni_diffusion_compile.bench.asking import PATHS, encoded
from vllm_omni_diffusion_compile.bench.server import Server, find_vllm
from vllm_omni_diffusion_compile.errors import BenchError, EvidenceError
from vllm_omni_diffusion_compile.upstream.arm import RPC_TIMEOUT_S, Arm, first_answer, result, write_artefact
from vllm_omni_diffusion_compile.upstream.observe import EXTENSION

LOG = "server.txt"
# Whoever started this process waits for as long as is right, and ends it.
_PATIENCE_S = 86400.0
_DEV_MODE = "VLLM_SERVER_DEV_MODE"
_RPC = "/collective_rpc"
# Fields of a request that the endpoint has, by their names in `OmniDiffusionSamplingParams`.
_FIELDS = {
    **{name: name for name in ("prompt", "negative_prompt", "seed", "num_inference_steps")},
    **{name: name for name in ("guidance_scale", "true_cfg_scale", "generator_device", "layers")},
    "num_outputs_per_prompt": "n",
    "extra_args": "extra_params",
}
_ERROR = re.compile(r"\b\w*(?:Error|Exception): .*\S")


def run_served(arm: Arm, folder: Path) -> dict[str, Any]:
    """Start a server, have the request answered twice, and stop it; the second time it is watched.

    Args:
        arm: What is run.
        folder: Where `seen.npz`, `artefact.npz` and the log of the server are written.

    Returns:
        As `arm.result` makes it.

    Raises:
        EvidenceError: The server does not start or answer, or its endpoint has no field for something.
    """
    request = json.dumps(_fields(arm.request)).encode()
    path, content_type = PATHS["image"], encoded({}, "image")[1]
    patience = {name: round(_PATIENCE_S) for name in ("stage_init_timeout", "init_timeout")}
    flags = as_flags({**patience, **arm.settings, "worker_extension_cls": EXTENSION})
    with tempfile.TemporaryDirectory(prefix="qualify-", ignore_cleanup_errors=True) as working:
        command = [find_vllm(), "serve", arm.checkpoint, "--omni", *flags]
        # Its caches are those of every arm.
        server = Server(command, log=folder / LOG, working=Path(working), private_caches=False)
        server.environment[_DEV_MODE] = "1"
        try:
            server.start()
            ready_s = server.wait_ready(_PATIENCE_S, lambda _: None)
            server.ask(path, request, content_type, _PATIENCE_S)
            key = _call(server, "diffusion_compile_observe", arm.in_fp32)
            asked = time.perf_counter()
            answer = server.answer(path, request, content_type, _PATIENCE_S)
            answered = time.perf_counter()
            facts = _call(server, "diffusion_compile_observed", str((folder / "seen.npz").resolve()))
        except BenchError as error:
            raise EvidenceError(f"{error}{_said(server)}; see {LOG}") from None
        finally:
            server.close()
    key["output_representation"] = write_artefact(_pictures(answer), folder / "artefact.npz")
    return result(arm, key, facts, ready_s=ready_s, request_s=answered - asked)


def _fields(request: Mapping[str, Any]) -> dict[str, Any]:
    given = dict(request)
    size = [given.pop(name, None) for name in ("width", "height")]
    unknown = [name for name in given if name not in _FIELDS]
    if unknown or (size[0] is None) != (size[1] is None):
        raise EvidenceError(
            f"request.{unknown[0] if unknown else 'width and height, of which one is missing,'} cannot be said to "
            f"{PATHS['image']}; leave it out, or leave out api: http (--api http)"
        )
    fields = {_FIELDS[name]: value for name, value in given.items()}
    return fields | ({} if size[0] is None else {"size": f"{size[0]}x{size[1]}"})


def _call(server: Server, method: str, argument: Any) -> dict[str, Any]:
    """Call a method of the workers."""
    body = json.dumps({"method": method, "args": [argument], "timeout": RPC_TIMEOUT_S}).encode()
    return first_answer(json.loads(server.answer(_RPC, body, "application/json", RPC_TIMEOUT_S))["results"], method)


def _said(server: Server) -> str:
    """Return the last error in the log of a server, to be put behind another one."""
    errors = [match[0] for line in server.tail(400).splitlines() if (match := _ERROR.search(line))]
    return f": {errors[-1]}" if errors else ""


def _pictures(answer: bytes) -> Iterator[Any]:
    import numpy as np
    from PIL import Image

    for item in json.loads(answer)["data"]:
        with Image.open(io.BytesIO(base64.b64decode(item["b64_json"]))) as picture:
            if picture.format != "PNG":  # another one may lose something
                raise EvidenceError(f"the server sent {picture.format}, expected PNG")
            yield np.asarray(picture)
