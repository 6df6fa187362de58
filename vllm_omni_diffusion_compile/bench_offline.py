"""One arm of `vllm-omni-compile bench --offline`: a program that answers requests with `Omni`, and nothing in between.

`python -m vllm_omni_diffusion_compile.bench_offline MODEL SETTINGS --task image --host H --port P`

It listens only so that the bench can drive it as it drives a server: /health, /metrics, the report, and /generate with
the fields of a request as JSON. One request at a time, in the main thread, where `Omni` was made.
"""

from __future__ import annotations

import argparse
import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

# Before Omni, which may resolve its configuration before plugins are loaded.
import vllm_omni_diffusion_compile.offline  # noqa: F401
from vllm_omni_diffusion_compile.upstream import reporting
from vllm_omni_diffusion_compile.warmup.report import ROUTE

# Fields of a request that are named otherwise in `OmniDiffusionSamplingParams`.
_RENAMED = {"extra_params": "extra_args", "n": "num_outputs_per_prompt"}


def main() -> None:
    """Load the model, then answer until killed."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("model")
    parser.add_argument("settings", type=json.loads)
    parser.add_argument("--task", choices=("image", "video"), required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    from vllm_omni.entrypoints.omni import Omni

    # Without statistics nothing is counted, compilation neither.
    omni = Omni(model=options.model, **({"log_stats": True} | options.settings))
    HTTPServer((options.host, options.port), _handler(omni, options.task)).serve_forever()


def generate(omni: Any, task: str, fields: dict[str, Any]) -> None:
    """Answer one request.

    Args:
        omni: The engine.
        task: What the prompt asks for.
        fields: As a server takes them.

    Raises:
        RuntimeError: It gave nothing.
    """
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

    fields = dict(fields)
    prompt = {"prompt": fields.pop("prompt"), "modalities": [task]}
    if "negative_prompt" in fields:
        prompt["negative_prompt"] = fields.pop("negative_prompt")
    width, height = map(int, fields.pop("size").split("x"))
    named = {_RENAMED.get(name, name): value for name, value in fields.items()}
    if not omni.generate(prompt, OmniDiffusionSamplingParams(width=width, height=height, **named), use_tqdm=False):
        raise RuntimeError("Omni.generate returned nothing")


def _handler(omni: Any, task: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/metrics":
                from prometheus_client import generate_latest

                self._answer(200, generate_latest())
            elif self.path == ROUTE:
                self._answer(200, json.dumps(reporting.latest()).encode())
            else:
                self._answer(200, b"{}")

        def do_POST(self) -> None:
            fields = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                generate(omni, task, fields)
            except Exception as error:  # noqa: BLE001 - whatever it was, the bench is told
                self._answer(500, json.dumps({"detail": f"{type(error).__name__}: {error}"}).encode())
            else:
                self._answer(200, b"{}")

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            """Log none: the bench knows what it asked."""

    return Handler


if __name__ == "__main__":
    main()
