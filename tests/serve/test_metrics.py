"""What `/metrics` of a real server says about compilation, beside everything that it said before."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serve.server import Server
from vllm_omni_diffusion_compile.commands.report import read

pytestmark = [pytest.mark.serve, pytest.mark.timeout(1200)]

READY_S = 900.0
OURS = "vllm_omni:diffusion_compile_"
SIZE = "128x128"
DECLARED = "256x256"


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Caches that the compiling servers share: the later one starts in half the time."""
    return tmp_path_factory.mktemp("caches")


def draw(server: Server, size: str = SIZE) -> None:
    server.images("a lighthouse", size=size, num_inference_steps=2, seed=1, n=1)


def families(server: Server) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Samples by name, then by labels."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        found.setdefault(family.name, {})
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def total(server: Server, name: str, **labels: str) -> float:
    """Sum of a counter of ours over all samples with the given labels."""
    samples = families(server).get(f"{OURS}{name}_total", {})
    return sum(value for found, value in samples.items() if labels.items() <= dict(found).items())


def counts(server: Server) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """How often each of the host's own metrics was counted or observed."""
    return {
        name: samples
        for name, samples in families(server).items()
        if name.startswith(("vllm:", "vllm_omni:")) and name.endswith(("_total", "_count")) and OURS not in name
    }


@pytest.fixture(scope="module")
def stock(klein: Path) -> tuple[set[str], dict[str, dict[tuple[tuple[str, str], ...], float]]]:
    """Families and counts of a server without our features, after three requests."""
    with Server(klein, "--enforce-eager", plugins="diffusion_cpu,vllm_omni_register_models") as server:
        draw(server, DECLARED)
        draw(server)
        draw(server)
        return set(families(server)), counts(server)


@contextlib.contextmanager
def started_while_clients_hang_up(server: Server) -> Iterator[Server]:
    """Start a server while clients begin to ask for a picture and go away."""
    ready = threading.Event()

    def ask() -> None:
        while not ready.wait(0.5):
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", server.port), timeout=1) as client,
            ):
                client.sendall(b"POST /v1/images/generations HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        with server:
            ready.set()
            thread.join()
            yield server
    finally:
        ready.set()


@pytest.mark.parametrize("options", [(), ("--distributed-executor-backend", "mp")], ids=["inline", "mp"])
def test_a_request_that_waits_for_the_compiler_is_counted(
    klein: Path,
    caches: Path,
    stock: tuple[set[str], dict[str, dict[tuple[tuple[str, str], ...], float]]],
    options: tuple[str, ...],
) -> None:
    settings = ("--no-diffusion-compile-dynamic", "--no-diffusion-compile-vae")
    declared = ("--diffusion-compile-config.warmup.shapes", DECLARED)
    starting = Server(klein, *settings, *declared, *options, caches=caches, ready_timeout_s=READY_S)
    with started_while_clients_hang_up(starting) as server:
        at_start = total(server, "compilations", after_ready="false")
        assert at_start >= 1
        assert total(server, "compilations", after_ready="true") == 0
        assert "Compiled before the server is ready" in server.log

        # Warm is what was declared, and nothing else.
        draw(server, DECLARED)
        assert total(server, "compilations", after_ready="true") == 0

        draw(server)
        waited = total(server, "compilations", after_ready="true", kind="recompilation")
        assert waited >= 1
        assert total(server, "s", after_ready="true") > 0.1
        assert server.log.count("A request waited") == total(server, "compilations", after_ready="true")

        draw(server)
        assert total(server, "compilations", after_ready="true", kind="recompilation") == waited
        assert total(server, "compilations", after_ready="false") == at_start
        assert total(server, "fallbacks") == total(server, "recompile_limit") == 0

        report = read(f"http://127.0.0.1:{server.port}")
        assert [(shape["name"], shape["state"]) for shape in report["shapes"]] == [(DECLARED, "warm")]
        assert report["shapes"][0]["compile_events"] == at_start - 2  # the dummy run of vLLM-Omni compiled the rest
        (met,) = report["undeclared"]
        assert (met["shape"]["width"], met["shape"]["steps"], met["compile_events"]) == (128, 2, waited)
        assert "- {width: 128, height: 128, steps: 2" in server.log

        names, values = stock
        assert names <= set(families(server))
        assert all(OURS in name for name in set(families(server)) - names)
        assert counts(server) == values
