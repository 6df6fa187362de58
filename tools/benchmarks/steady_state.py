"""Steady-state latency with every option at its default, beside stock vLLM-Omni: one request to each in turn.

Two servers of a tiny checkpoint run at once and are idle but for one request at a time, so that the machine's drift
hits both alike. Run it with

    python -m tools.benchmarks.steady_state klein

or minimax_h3, qwen_image, wan.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.serve.server import Server
from tools.tiny_checkpoints.checkpoint import made

STOCK = "diffusion_cpu,vllm_omni_register_models"
# A first start compiles for minutes.
READY_S = 900.0


def request_image(server: Server) -> None:
    """Ask for a picture."""
    server.images("a lighthouse", size="256x256", num_inference_steps=4, seed=1, n=1)


def request_silent_video(server: Server) -> None:
    """Ask for a video."""
    server.videos("a cat", size="128x128", num_frames=9, num_inference_steps=2, seed=1)


def request_video(server: Server) -> None:
    """Ask for a video with sound."""
    aspect = {"aspect_ratio": "1:1"}
    server.videos("a cat", size="64x64", num_inference_steps=4, seed=1, seconds=4, fps=24, extra_params=aspect)


MODELS: dict[str, tuple[str, tuple[str, ...], Any]] = {
    "klein": ("", (), request_image),
    "qwen_image": ("", (), request_image),
    "wan": ("", (), request_silent_video),
    "minimax_h3": ("FL2VA", ("--trust-remote-code",), request_video),
}


def main() -> None:
    """Start both servers, warm them up with a few requests, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("--requests", type=int, default=40, help="measured requests to each server (default: 40)")
    parser.add_argument("--json", type=Path, help="also write all samples there")
    arguments = parser.parse_args()
    folder, options, request = MODELS[arguments.model]
    checkpoint = made(arguments.model) / folder
    with ExitStack() as stack:
        servers = {
            arm: stack.enter_context(Server(checkpoint, *options, plugins=plugins, ready_timeout_s=READY_S))
            for arm, plugins in (("stock", STOCK), ("ours", None))
        }
        samples = _alternate(servers, request, arguments.requests)
        startup = {arm: server.startup_s for arm, server in servers.items()}
    medians = {arm: statistics.median(seconds) for arm, seconds in samples.items()}
    table = Table(
        "", "stock", "ours", "ours / stock", title=f"{arguments.model}, {arguments.requests} requests to each"
    )
    for name, values in (("time to ready, s", startup), ("median request, s", medians)):
        table.add_row(name, *(f"{values[arm]:.3f}" for arm in servers), f"{values['ours'] / values['stock']:.3f}")
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps({"startup_s": startup, "samples_s": samples}, indent=1))


def _alternate(servers: dict[str, Server], request: Any, count: int) -> dict[str, list[float]]:
    for server in servers.values():
        for _ in range(3):
            request(server)
    samples: dict[str, list[float]] = {arm: [] for arm in servers}
    for turn in range(count):
        # Who begins changes, so that neither always runs in the other's wake.
        for arm in list(servers)[:: 1 if turn % 2 else -1]:
            start = time.perf_counter()
            request(servers[arm])
            samples[arm].append(time.perf_counter() - start)
    return samples


if __name__ == "__main__":
    main()
