"""An arm over HTTP, against a server that answers at once."""

from __future__ import annotations

import io
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from tests.unit.evidence.rows import TRACE
from vllm_omni_diffusion_compile.errors import EvidenceError
from vllm_omni_diffusion_compile.upstream.arm import Arm
from vllm_omni_diffusion_compile.upstream.observe import EXTENSION
from vllm_omni_diffusion_compile.upstream.served import run_served

PICTURE = np.arange(4 * 8 * 3, dtype=np.uint8).reshape(4, 8, 3)
REQUEST = {"prompt": "a cat", "seed": 1, "width": 8, "height": 4, "num_inference_steps": 2, "extra_args": {"a": 1}}
KEY, FACTS = {"model": "Flux2KleinPipeline"}, TRACE | {"packed": None, "not_as_asked": []}

# As vLLM has it: the route for methods of workers is there in development mode only.
STAND_IN = """
    import base64, json, os, pathlib, sys
    from http.server import BaseHTTPRequestHandler, HTTPServer

    folder = pathlib.Path({folder!r})
    if "--enforce-eager" in sys.argv:
        print("ValueError: no kernel, says the stand-in")
        sys.exit(1)
    answers = json.loads((folder / "answers.json").read_text())
    has_methods = os.environ.get("VLLM_SERVER_DEV_MODE") == "1" and {extension!r} in sys.argv

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer(200, {{}})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with (folder / "asked").open("a") as file:
                file.write(json.dumps([self.path, body]) + "\\n")
            if self.path == "/v1/images/generations":
                picture = base64.b64encode((folder / "picture").read_bytes()).decode()
                self.answer(200, {{"data": [{{"b64_json": picture}}]}})
            elif self.path == "/collective_rpc" and has_methods:
                if body["method"] == "diffusion_compile_observed":
                    pathlib.Path(body["args"][0]).write_bytes(b"seen")
                self.answer(200, {{"results": [{{"todo": "not here"}}, [answers[body["method"]]]]}})
            else:
                self.answer(404, {{"detail": "Not Found"}})

        def answer(self, status, content):
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for an arm, with the stand-in where `vllm` is looked for."""
    program = tmp_path / "vllm"
    code = textwrap.dedent(STAND_IN.format(folder=str(tmp_path), extension=EXTENSION))
    program.write_text(f"#!{sys.executable} -IS\n{code}")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    answers = {"diffusion_compile_observe": KEY, "diffusion_compile_observed": FACTS}
    (tmp_path / "answers.json").write_text(json.dumps(answers))
    _draw(tmp_path, "PNG")
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "arm").mkdir()
    return tmp_path


def _draw(folder: Path, kind: str) -> None:
    file = io.BytesIO()
    Image.fromarray(PICTURE).save(file, format=kind)
    (folder / "picture").write_bytes(file.getvalue())


def _run(folder: Path, **changes: Any) -> dict[str, Any]:
    described = {"checkpoint": str(folder / "checkpoint"), "settings": {"dtype": "bfloat16"}, "request": REQUEST}
    return run_served(Arm(**described | changes), folder / "arm")


def test_the_second_request_is_watched_and_its_picture_is_kept(folder: Path) -> None:
    result = _run(folder)
    asked = [json.loads(line) for line in (folder / "asked").read_text().splitlines()]
    image = [
        "/v1/images/generations",
        {"prompt": "a cat", "seed": 1, "num_inference_steps": 2, "extra_params": {"a": 1}, "size": "8x4"},
    ]
    assert [path if path != image[0] else [path, body] for path, body in asked] == [
        image, "/collective_rpc", image, "/collective_rpc",
    ]  # fmt: skip
    assert (folder / "arm" / "seen.npz").read_bytes() == b"seen"
    with np.load(folder / "arm" / "artefact.npz") as arrays:
        np.testing.assert_array_equal(arrays["artefact 1"], PICTURE)
    assert result["trace"] == TRACE and result["not_as_asked"] == []
    assert result["key"] == KEY | {"output_representation": "3-dimensional uint8"}
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(folder) in str(p.info["cmdline"])]


def test_a_server_that_does_not_start_says_why(folder: Path) -> None:
    with pytest.raises(EvidenceError, match=r"ended with status 1 .*: ValueError: no kernel, says the stand-in; see"):
        _run(folder, settings={"enforce_eager": True})


def test_a_picture_that_lost_something_on_its_way_is_refused(folder: Path) -> None:
    _draw(folder, "JPEG")
    with pytest.raises(EvidenceError, match="the server sent JPEG, expected PNG"):
        _run(folder)


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (REQUEST | {"latents": "none"}, "request.latents cannot be said to /v1/images/generations"),
        ({"prompt": "a cat", "width": 8}, "request.width and height, of which one is missing, cannot be said"),
    ],
)
def test_what_the_endpoint_has_no_field_for_is_refused(folder: Path, request_: dict[str, Any], said: str) -> None:
    with pytest.raises(EvidenceError, match=said):
        _run(folder, request=request_)
    assert not (folder / "asked").exists()
