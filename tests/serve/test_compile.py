"""The compile features in a real server: settings, compiled VAE decode, and nothing compiled after ready."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.docs.pages import DOCS, commands
from tests.serve.server import Server
from tools.demo.trace import Counts, count

pytestmark = [pytest.mark.serve, pytest.mark.timeout(1200)]

PROBE = {"PYTHONPATH": str(Path(__file__).parent / "probe")}
READY_S = 900.0
QUICKSTART = [command for command in commands(DOCS / "quickstart.md") if not command.inline]
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def draw(server: Server, size: str, steps: int = 2) -> np.ndarray:
    (png,) = server.images("a lighthouse", size=size, num_inference_steps=steps, seed=1, n=1)
    picture = np.asarray(Image.open(io.BytesIO(png)).convert("RGB"), dtype=np.float64)
    width, height = map(int, size.split("x"))
    assert picture.shape == (height, width, 3)
    return picture


def psnr(picture: np.ndarray, reference: np.ndarray) -> float:
    """Peak signal-to-noise ratio of 8-bit pictures, in dB."""
    return float(10 * np.log10(255**2 / max(np.mean((picture - reference) ** 2), 1e-12)))


def messages(server: Server) -> list[str]:
    return ANSI.sub("", server.log).splitlines()


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Caches that the compiling servers of this module share: the later ones start in half the time."""
    return tmp_path_factory.mktemp("caches")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trace")


@pytest.fixture(scope="module")
def compiled(klein: Path, caches: Path, trace: Path) -> Iterator[tuple[Server, float]]:
    """The server of the quickstart, which has the default settings, and when it was ready."""
    serve = next(command for command in QUICKSTART if command.words[:3] == ("vllm", "serve", "MODEL"))
    assert serve.words == ("vllm", "serve", "MODEL", "--omni") and not serve.environment
    with Server(klein, env=PROBE | {"TORCH_TRACE": str(trace)}, caches=caches, ready_timeout_s=READY_S) as server:
        yield server, time.time()


@pytest.fixture(scope="module")
def eager(klein: Path) -> Iterator[Server]:
    """An eager server with worker processes and every setting off its default."""
    processes = ("--distributed-executor-backend", "mp")
    settings = ("--enforce-eager", "--no-diffusion-compile-vae", "--no-diffusion-compile-dynamic")
    scope = ("--diffusion-compile-granularity", "full")
    flag = "--diffusion-compile-config"
    config = (flag, '{"recompile_limit": 16}', f"{flag}.on_failure", "raise", f"{flag}.infer_regions=false")
    with Server(klein, *processes, *settings, *scope, *config, env=PROBE, ready_timeout_s=READY_S) as server:
        yield server


@pytest.fixture(scope="module")
def again(compiled: tuple[Server, float], klein: Path, caches: Path) -> Iterator[Server]:
    """A second start with the caches of the first one, and a compiled decode that fails."""
    with Server(klein, env=PROBE | {"PROBE_BREAK_DECODE": "1"}, caches=caches, ready_timeout_s=READY_S) as server:
        yield server


def test_no_user_waits_for_the_compiler(compiled: tuple[Server, float], trace: Path) -> None:
    server, ready = compiled
    for size in ("512x512", "768x640", "256x320", "384x256", "512x512"):
        draw(server, size)
    counts: Counts = count(trace, ready)
    assert counts.before > 0
    assert counts.after == 0
    assert counts.transformer_functions > 0
    assert counts.vae_functions > 0


def test_what_the_quickstart_asks_of_its_server_is_answered(compiled: tuple[Server, float], tmp_path: Path) -> None:
    answers = []
    for command in QUICKSTART:
        if command.words[0] == "curl":
            words = [word.replace("localhost:8000", f"127.0.0.1:{compiled[0].port}") for word in command.words]
            done = subprocess.run([*words, "--fail"], cwd=tmp_path, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            answers.append(done.stdout)
    png = base64.b64decode(json.loads((tmp_path / "picture.json").read_text())["data"][0]["b64_json"])
    assert Image.open(io.BytesIO(png)).size == (512, 512)
    samples = [line for line in answers[-1].splitlines() if "diffusion_compile_compilations_total{" in line]
    assert samples and all('after_ready="false"' in sample for sample in samples)


def test_the_log_says_what_was_warmed_and_nothing_fell_back(compiled: tuple[Server, float]) -> None:
    server, _ = compiled
    warmed = [line for line in messages(server) if "real request-path warmup at" in line]
    assert ["512x512" in warmed[0], "768x640" in warmed[1]] == [True, True]
    assert "0 of them in VAE decode" in warmed[-1]
    assert "retrying eagerly" not in server.log and "serving will continue" not in server.log
    assert sum("vllm-omni-diffusion-compile" in line and "graft(s) applied" in line for line in messages(server)) == 1


def test_the_picture_is_the_eager_one(compiled: tuple[Server, float], eager: Server) -> None:
    # The two servers differ in nothing but compilation: the eager one switched all of it off.
    assert psnr(draw(compiled[0], "256x256", steps=4), draw(eager, "256x256", steps=4)) >= 40


def test_the_defaults_reach_the_worker(compiled: tuple[Server, float]) -> None:
    (line,) = [line for line in messages(compiled[0]) if "PROBE worker" in line]
    assert line.endswith("eager=False, granularity=regional, dynamic=True, vae=True, config=None")


def test_each_flag_reaches_a_worker_process(eager: Server) -> None:
    (line,) = [line for line in messages(eager) if "PROBE worker" in line]
    config = {"on_failure": "raise", "infer_regions": False, "recompile_limit": 16}
    assert line.endswith(f"eager=True, granularity=full, dynamic=False, vae=False, config={config}")
    assert int(re.search(r"PROBE worker (\d+)", line)[1]) != eager.pid  # type: ignore[index]
    assert "No real request-path warmup: compilation is off (enforce_eager)" in eager.log


def test_a_vae_that_cannot_be_compiled_is_decoded_eagerly(again: Server, eager: Server) -> None:
    assert psnr(draw(again, "256x256", steps=4), draw(eager, "256x256", steps=4)) >= 40
    (line,) = [line for line in messages(again) if "disabling compilation and retrying eagerly" in line]
    assert "vae.decode" in line and "RuntimeError: PROBE broke the compiled decode" in line


def test_a_second_start_begins_with_what_the_first_compiled(
    compiled: tuple[Server, float], again: Server, caches: Path
) -> None:
    (kept,) = [line for line in messages(compiled[0]) if "artifact(s) kept for the next start" in line]
    (found,) = [line for line in messages(again) if "Compile cache:" in line and " from " in line]
    (bundle,) = (caches / "vllm" / "diffusion_compile").glob("*.tar")
    assert re.search(r"\d+ artifact", kept)[0] == re.search(r"\d+ artifact", found)[0]  # type: ignore[index]
    assert found.endswith(f"from {bundle}.")


def test_without_a_compiler_the_server_starts_and_says_so_once(klein: Path, eager: Server) -> None:
    with Server(klein, env={"CXX": "/nonexistent/c++"}, ready_timeout_s=READY_S) as server:
        assert psnr(draw(server, "256x256", steps=4), draw(eager, "256x256", steps=4)) >= 40
        (line,) = [line for line in messages(server) if "InvalidCxxCompiler" in line]
    assert "retrying eagerly gave the result. Nothing can be compiled on this machine" in line


def test_minimax_h3_is_left_alone_and_the_log_says_why(h3: Path) -> None:
    settings = ("--diffusion-compile-granularity", "full", "--no-diffusion-compile-dynamic", "--diffusion-compile-vae")
    with Server(h3, "--trust-remote-code", *settings, env=PROBE, ready_timeout_s=READY_S) as server:
        # In this process, where the one above had worker processes.
        assert f"PROBE worker {server.pid}: eager=False, granularity=full, dynamic=False, vae=True" in server.log
        assert any("video_vae.decode is not compiled" in line and "decode_latent" in line for line in messages(server))
        assert "No real request-path warmup: MiniMaxH3Pipeline takes no dummy run" in server.log


@pytest.mark.parametrize("signals", [1, 2])
def test_an_interrupt_while_it_starts_ends_the_server(klein: Path, caches: Path, signals: int) -> None:
    server = Server(klein, caches=caches)
    server.start()
    try:
        # One signal ends the server when it has started, and keeps it from warming up any further. Two end it at once.
        said = "Warming up with a request of 512x512" if signals == 1 else "dummy run to warm up the model"
        deadline = time.monotonic() + READY_S
        while said not in server.log:
            assert time.monotonic() < deadline, server.tail()
            time.sleep(0.05)
        # Nobody is connected yet whose request would be lost.
        with pytest.raises(httpx.ConnectError):
            server.get("/health")
        for _ in range(signals):
            os.kill(server.pid, signal.SIGINT)
            time.sleep(1)
        assert server.wait(60 if signals == 1 else 15) is not None, server.tail()
        assert server.left_behind() == []
        assert "real request-path warmup at 640x768" not in server.log
    finally:
        server.stop()
