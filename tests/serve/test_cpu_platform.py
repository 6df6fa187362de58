"""Stock vLLM-Omni serving on a machine without an accelerator: the CPU platform alone, the compile features switched
off."""

from __future__ import annotations

import io
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from tests.serve.server import Server

# Starts of a server on a busy machine take a minute each; the compiled one compiles.
pytestmark = [pytest.mark.serve, pytest.mark.timeout(600)]

STOCK = "diffusion_cpu,vllm_omni_register_models"
MP = ("--distributed-executor-backend", "mp")
# bf16 arithmetic in another order; two unrelated pictures of these checkpoints are below 30 dB.
SAME_PICTURE_DB = 40.0
# MiniMax-H3 takes keyframes from 256 pixels on, and 0.28 resizes them to the size of the video before it looks.
H3_SIDE = 256


def _draw(server: Server, seed: int = 1, size: str = "128x128") -> np.ndarray:
    (png,) = server.images("a cat", size=size, num_inference_steps=2, seed=seed, n=1)
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"), dtype=np.float64)


def _film(server: Server, keyframes: tuple[bytes, ...] = ()) -> tuple[np.ndarray, float]:
    """Return the frames, [frame, height, width, channel], and the seconds of sound."""
    answer = server.video_response(
        "a cat",
        keyframes=keyframes,
        size=f"{H3_SIDE}x{H3_SIDE}",
        num_inference_steps=2,
        seed=1,
        seconds=4,
        fps=24,
        extra_params={"aspect_ratio": "1:1"},
    )
    mp4 = answer.content
    assert 100 < float(answer.headers["X-Peak-Memory-MB"]) < 100_000
    with av.open(io.BytesIO(mp4)) as container:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    with av.open(io.BytesIO(mp4)) as container:
        sound_s = sum(frame.samples / frame.sample_rate for frame in container.decode(audio=0))
    return frames.astype(np.float64), sound_s


def _psnr_db(a: np.ndarray, b: np.ndarray) -> float:
    assert a.shape == b.shape
    error = float(np.mean((a - b) ** 2))
    return float("inf") if error == 0 else 10 * float(np.log10(255**2 / error))


def _keyframe(level: int) -> bytes:
    """A PNG file: a ramp from black to `level`."""
    ramp = np.tile(np.linspace(0, level, H3_SIDE).astype(np.uint8), (H3_SIDE, 1))
    file = io.BytesIO()
    Image.fromarray(np.stack([ramp] * 3, axis=-1)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def reference(klein: Path) -> np.ndarray:
    """The picture of the plain inline server; what the other Klein servers are held against."""
    with Server(klein, "--enforce-eager", plugins=STOCK) as server:
        picture = _draw(server)
        assert picture.shape == (128, 128, 3)
        assert picture.std() > 1, "the picture is one colour"
        assert np.array_equal(picture, _draw(server)), "the same seed made another picture"
        assert _psnr_db(picture, _draw(server, seed=2)) < SAME_PICTURE_DB, "the seed does not matter"
        assert _draw(server, size="192x128").shape == (128, 192, 3)
        assert "diffusion_cpu is activated" in server.log
        assert "Loading plugin diffusion_compile" not in server.log, "the compile features were loaded"
        assert server.interrupt() is not None, "SIGINT did not end an idle server"
    return picture


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(MP, id="mp"),
        pytest.param(("--enable-layerwise-offload",), id="layerwise-offload"),
        pytest.param(("--enable-cpu-offload",), id="cpu-offload"),
    ],
)
def test_klein_draws_the_same_picture(klein: Path, reference: np.ndarray, options: tuple[str, ...]) -> None:
    with Server(klein, "--enforce-eager", *options, plugins=STOCK) as server:
        assert _psnr_db(_draw(server), reference) > SAME_PICTURE_DB
        if options == MP:
            assert len(server.processes()) > 2, "the worker has no process of its own"


def test_klein_draws_the_same_picture_compiled(klein: Path, reference: np.ndarray, tmp_path: Path) -> None:
    with Server(klein, plugins=STOCK, caches=tmp_path) as server:
        assert _psnr_db(_draw(server), reference) > SAME_PICTURE_DB
    assert any((tmp_path / "inductor").rglob("*.so")), "inductor compiled nothing"


@pytest.mark.parametrize(
    "options",
    [pytest.param((), id="inline"), pytest.param((*MP, "--enable-layerwise-offload"), id="mp-layerwise-offload")],
)
def test_h3_films_text_and_keyframes(h3: Path, options: tuple[str, ...]) -> None:
    with Server(h3, "--enforce-eager", "--trust-remote-code", *options, plugins=STOCK) as server:
        text, sound_s = _film(server)
        # 4 s at 24 frames a second, lengthened to the next 17 n + 5.
        assert text.shape == (107, H3_SIDE, H3_SIDE, 3)
        assert sound_s == pytest.approx(107 / 24, abs=0.2)
        assert text.std() > 1, "the video is one colour"
        first, _ = _film(server, (_keyframe(255),))
        other, _ = _film(server, (_keyframe(40),))
        both, _ = _film(server, (_keyframe(255), _keyframe(40)))
        for made, against, what in (
            (first, text, "a first frame"),
            (other, first, "another first frame"),
            (both, first, "a last frame"),
        ):
            assert made.shape == text.shape
            assert not np.array_equal(made, against), f"{what} does not matter"
