"""A `vllm serve` that answers at once, with the metrics of a server of ours; STAND_IN makes some arms misbehave.

STAND_IN is JSON: from an argument that an arm has to what its servers do.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

WHAT = {does for argument, does in json.loads(os.environ.get("STAND_IN", "{}")).items() if argument in sys.argv}
EAGER = "--enforce-eager" in sys.argv
CONFIG = json.loads(sys.argv[sys.argv.index("--diffusion-compile-config") + 1])
KEPT = Path(CONFIG["cache_dir"], "bundle.tar")
COLD = not KEPT.exists()
BEFORE = 'model_name="m",stage="0",component="transformer",region="Block",kind="compilation",after_ready="false"'
STUBBORN = (
    "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; print('up', flush=True); time.sleep(60)"
)
asked: list[bytes] = []


def metrics() -> str:
    lines = [
        "# HELP vllm_omni:diffusion_compile_compilations_total graphs",
        'vllm_omni:peak_memory_mb{stage="0"} 2048.0',
    ]
    if not EAGER:
        lines += [
            f"vllm_omni:diffusion_compile_compilations_total{{{BEFORE}}} 3.0",
            f"vllm_omni:diffusion_compile_s_total{{{BEFORE}}} {9.5 if COLD else 1.5}",
        ]
    if "recompile" in WHAT:
        after = BEFORE.replace('after_ready="false"', 'after_ready="true"')
        lines.append(f"vllm_omni:diffusion_compile_compilations_total{{{after}}} 1.0")
    return "\n".join(lines) + "\n"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/metrics":
            self.answer(200, metrics().encode())
        elif self.path == "/health":
            self.answer(503 if "unhealthy" in WHAT else 200, b"{}")
        elif EAGER:
            self.answer(404, b"{}")
        else:
            self.answer(200, json.dumps({"version": 1, "shapes": []}).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        asked.append(body)
        if "hang" in WHAT:
            Path(os.environ["STAND_IN_ASKED"]).touch()
            time.sleep(60)
        if "fail-second" in WHAT and len(asked) > 1:
            self.answer(500, b'{"detail": "out of memory, says the stand-in"}')
            return
        # Far enough apart for a busy machine.
        time.sleep(0.2 if EAGER else 0.02)
        self.answer(200, b"x" * 100)

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


print("INFO 11-29 19:30:42 [compile.py:103] The stand-in begins.", flush=True)
if "dense" in WHAT:
    for _ in range(2):
        print(
            "INFO 11-29 19:30:43 [x.py:1] RAINFUSION_ATTN stays dense: 64 video rows are fewer than 4096.", flush=True
        )
if "die" in WHAT:
    # Whoever looks for children of the dead finds none.
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", os.environ["STAND_IN_ASKED"]])
    sys.exit("ValueError: no kernel, says the stand-in")
if "stubborn" in WHAT:
    # One child in the session of its parent, one that left it; none of them goes before SIGKILL.
    for elsewhere in (False, True):
        child = subprocess.Popen(
            [sys.executable, "-c", STUBBORN, os.environ["STAND_IN_ASKED"]],
            stdout=subprocess.PIPE,
            start_new_session=elsewhere,
        )
        assert child.stdout is not None
        child.stdout.readline()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
KEPT.touch()
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
