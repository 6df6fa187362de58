"""A `vllm serve` that answers at once and writes a trace as torch does; `--stand-in WHAT` makes it misbehave."""

from __future__ import annotations

import base64
import io
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, TextIO

from PIL import Image

OURS = "diffusion_compile" in os.environ["VLLM_PLUGINS"].split(",")
WHAT = sys.argv[sys.argv.index("--stand-in") + 1] if "--stand-in" in sys.argv else ""
STUBBORN = (
    "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; print('up', flush=True); time.sleep(60)"
)


FRAMES = itertools.count()
SIZES: set[str] = set()


def compiled(file: str, *, vae: bool = False) -> None:
    frame = {"frame_id": next(FRAMES), "frame_compile_id": 0}
    metrics = {"co_filename": file, "co_firstlineno": 1, "co_name": "forward", "has_guarded_code": True}
    metrics |= {"graph_op_count": 1, "end_time_us": time.time_ns() // 1000}
    with Path(os.environ["TORCH_TRACE"], "dedicated_log_torch_trace_0.log").open("a") as trace:
        write(trace, {"dynamo_output_graph": {}} | frame)
        if vae:
            trace.write("\t# File: diffusers/models/autoencoders/vae.py:1 in decode, code: x\n")
        write(trace, {"compilation_metrics": metrics} | frame)


def write(trace: TextIO, record: dict[str, Any]) -> None:
    trace.write(f"V1129 19:31:33.475000 9953 torch/_dynamo/utils.py:2009] {json.dumps(record)}\n")


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.answer(b"")

    def do_POST(self) -> None:
        size = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["size"]
        if (not OURS or WHAT == "recompile") and size not in SIZES:
            compiled("a_transformer.py")
        SIZES.add(size)
        if WHAT == "hang":
            Path("requested").touch()
            time.sleep(60)
        width, height = (int(pixels) for pixels in size.split("x"))
        picture = io.BytesIO()
        Image.new("RGB", (width // 2 if WHAT == "small" else width, height)).save(picture, format="PNG")
        b64_json = base64.b64encode(picture.getvalue()).decode()
        self.answer(json.dumps({"data": [{"b64_json": b64_json}]}).encode())

    def answer(self, body: bytes) -> None:
        self.send_response(500 if WHAT == "error" and self.command == "POST" else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


print("INFO 11-29 19:30:42 [compile.py:103] Regional compilation applied to 4 module(s) for repeated blocks ['A'].")
if WHAT == "refuse":
    sys.exit("unrecognized arguments: --stand-in refuse")
if WHAT == "stubborn":
    # One child in the session of its parent, one that left it; none of them goes before SIGKILL.
    for elsewhere in (False, True):
        child = subprocess.Popen(
            [sys.executable, "-c", STUBBORN, str(Path.cwd())], stdout=subprocess.PIPE, start_new_session=elsewhere
        )
        assert child.stdout is not None
        child.stdout.readline()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
compiled("a_transformer.py")
if OURS:
    compiled("vae.py", vae=True)
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
