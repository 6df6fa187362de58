"""Packed lengths of MiniMax-H3 over HTTP: pinned by a request, chosen from the server's buckets, refused."""

from __future__ import annotations

import base64
import functools
import io
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image
from websockets.sync.client import connect

from tests.serve.server import Server

pytestmark = [pytest.mark.serve, pytest.mark.timeout(600)]

ANSI = re.compile(r"\x1b\[[0-9;]*m")
PACKED = re.compile(r"MiniMax H3 packed sequence: task=(\w+) pad_seq_len=(\w+) used=(\d+) seq_len=(\d+)")
BUCKETS = (640, 1024, 4096)
FILM: Mapping[str, Any] = {"size": "64x64", "seconds": "4", "fps": "24", "num_inference_steps": "2", "seed": "1"}
# 107 frames of 64x64: 32 latent frames of 4 rows, and 178 steps of sound on two channels.
KNOWN = 32 * 4 + 2 * 178
# 0.28.0 scales what is uploaded to the size of the video, and takes nothing below 256 pixels.
OF_PHOTOS = {**FILM, "size": "256x256"}
KNOWN_OF_PHOTOS = 32 * 64 + 2 * 178
EXTRA = {"aspect_ratio": "1:1"}

# Each with the status and what the message says of it besides key and value.
BAD_PINS: Mapping[str, tuple[object, int, str]] = {
    "bool": (True, 400, "pad_seq_len is True (bool), expected a whole number"),
    "text": ("1024", 400, "pad_seq_len is '1024' (str), expected a whole number"),
    "float": (1024.0, 400, "pad_seq_len is 1024.0 (float), expected a whole number"),
    "list": ([1024], 400, "pad_seq_len is [1024] (list), expected a whole number"),
    "mapping": ({"rows": 1024}, 400, "pad_seq_len is {'rows': 1024} (dict), expected a whole number"),
    "zero": (0, 400, "pad_seq_len is 0, expected a positive multiple of 64"),
    "negative": (-1024, 400, "pad_seq_len is -1024, expected a positive multiple of 64"),
    "odd": (1000, 400, "pad_seq_len is 1000, expected a multiple of 64, such as 960 or 1024"),
    "too small": (
        448,
        400,
        "pad_seq_len is 448, expected at least",
    ),
    "too large": (2**20 + 64, 413, "pad_seq_len is 1048640, expected at most 1048576 rows"),
}


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the servers put their temporary files and their videos."""
    return tmp_path_factory.mktemp("temporary")


def _start(model: Path, temporary: Path) -> Server:
    config = {"pad_seq_buckets": {"lengths": BUCKETS, "over": "reject"}}
    return Server(
        model, "--trust-remote-code", "--enforce-eager", "--diffusion-compile-config", json.dumps(config),
        env={"TMPDIR": str(temporary), "VLLM_OMNI_STORAGE_PATH": str(temporary / "videos")},
    )  # fmt: skip


@pytest.fixture(scope="module")
def server(h3: Path, temporary: Path) -> Iterator[Server]:
    with _start(h3, temporary) as server:
        yield server


def _packed(server: Server, send: Callable[[], object]) -> tuple[str, ...]:
    """What the log says of the one sequence that was packed for a request."""
    before = len(PACKED.findall(ANSI.sub("", server.log)))
    send()
    (line,) = PACKED.findall(ANSI.sub("", server.log))[before:]
    return tuple(line)


def _said(answer: httpx.Response) -> str:
    """The message of an error, in whichever of the host's two forms."""
    body = answer.json()
    return str(body["detail"] if "detail" in body else body["error"]["message"])


def _photo(width: int = 256, height: int = 256) -> bytes:
    file = io.BytesIO()
    Image.linear_gradient("L").resize((width, height)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("extra", "expected"), [({}, 640), ({"pad_seq_len": 1024}, 1024), ({"pad_seq_len": 1152}, 1152)]
)
def test_text_to_video_is_padded(server: Server, extra: dict[str, Any], expected: int) -> None:
    task, pinned, used, length = _packed(server, lambda: server.videos("a cat", **FILM, extra_params=EXTRA | extra))
    assert (task, int(pinned), int(length)) == ("t2va", expected, expected)
    assert int(used) == KNOWN + len("a cat"), "the tiny tokenizer makes a token of each byte"


@pytest.mark.parametrize("count", [1, 2])
def test_keyframes_to_video_is_padded(server: Server, count: int) -> None:
    for extra in ({}, {"pad_seq_len": 5120}):
        form = {**OF_PHOTOS, "extra_params": EXTRA | extra}
        task, pinned, used, length = _packed(
            server, functools.partial(server.videos, "a cat", keyframes=[_photo()] * count, **form)
        )
        assert int(used) > KNOWN_OF_PHOTOS + 64 * count
        expected = extra.get("pad_seq_len") or min(bucket for bucket in BUCKETS if bucket >= int(used))
        assert (task, int(pinned), int(length)) == ("fl2va", expected, expected)


def test_the_video_does_not_depend_on_the_length(server: Server) -> None:
    videos = {server.videos("a cat", **FILM, extra_params=EXTRA | pin) for pin in ({}, {"pad_seq_len": 2048})}
    assert len(videos) == 1


def test_references_to_video_is_padded(h3: Path, temporary: Path) -> None:
    with _start(h3.with_name("Ref2VA"), temporary) as server:

        def film(**extra: Any) -> httpx.Response:
            form = {**OF_PHOTOS, "prompt": "a cat", "extra_params": json.dumps(EXTRA | extra)}
            photo = ("cat.png", _photo(), "image/png")
            return server.post("/v1/videos/sync", data=form, files=[("input_references", photo)])

        # The reference is scaled to 2048x2048 pixels, and the text encoder looks at it too.
        answer = film()
        assert answer.status_code == 413 and f"expected at most {BUCKETS[-1]}" in _said(answer), answer.text
        answer = film(pad_seq_len=4096)
        assert answer.status_code == 400 and "pad_seq_len is 4096, expected at least" in answer.text
        for name, (pin, status, message) in BAD_PINS.items():
            answer = film(pad_seq_len=pin)
            assert (answer.status_code, message in _said(answer)) == (status, True), (name, answer.text)
        task, pinned, used, length = _packed(server, lambda: film(pad_seq_len=16384))
        assert (task, int(pinned), int(length)) == ("ref2va", 16384, 16384)
        assert int(used) > KNOWN_OF_PHOTOS + 64 * 64


# --- refused ---------------------------------------------------------------------------------------------------------


def _videos(server: Server, extra: dict[str, Any], path: str) -> httpx.Response:
    form = {**FILM, "prompt": "a cat", "extra_params": json.dumps(EXTRA | extra)}
    # With an upload, which would be stored.
    return server.post(path, data=form, files=[("input_references", ("cat.png", _photo(), "image/png"))])


def _download(server: Server, extra: dict[str, Any], path: str) -> httpx.Response:
    form = {**FILM, "prompt": "a cat", "extra_params": json.dumps(EXTRA | extra)}
    # Nobody listens there: were it asked first, the answer would be another one.
    form["image_reference"] = json.dumps({"image_url": "http://127.0.0.1:9/cat.png"})
    return server.post(path, data=form)


def _images(server: Server, extra: dict[str, Any]) -> httpx.Response:
    body = {"prompt": "a cat", "size": "64x64", "num_inference_steps": 2, "n": 1}
    return server.post("/v1/images/generations", json=body | {"extra_params": EXTRA | {"duration": 4} | extra})


def _chat(server: Server, extra: dict[str, Any], path: str, holder: str) -> httpx.Response:
    url = f"data:image/png;base64,{base64.b64encode(_photo()).decode()}"
    content = [{"type": "text", "text": "a cat"}, {"type": "image_url", "image_url": {"url": url}}]
    message: Any = {"role": "user", "content": content}
    messages: Any = [[message], [message]] if path.endswith("batch") else [message]
    about = {"width": 64, "height": 64, "num_inference_steps": 2}
    return server.post(path, json={"messages": messages, **about, holder: EXTRA | {"duration": 4} | extra})


ENDPOINTS: Mapping[str, Callable[[Server, dict[str, Any]], httpx.Response]] = {
    "videos/sync": lambda server, extra: _videos(server, extra, "/v1/videos/sync"),
    "videos": lambda server, extra: _videos(server, extra, "/v1/videos"),
    "videos, with a download": lambda server, extra: _download(server, extra, "/v1/videos"),
    "images": _images,
    "chat": lambda server, extra: _chat(server, extra, "/v1/chat/completions", "extra_args"),
    "chat, old name": lambda server, extra: _chat(server, extra, "/v1/chat/completions", "extra_params"),
    "chat, batch": lambda server, extra: _chat(server, extra, "/v1/chat/completions/batch", "extra_args"),
}


def _files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_bad_pin_is_refused_before_any_work(server: Server, temporary: Path, endpoint: str) -> None:
    before, jobs = _files(temporary), server.get("/v1/videos").json()["data"]
    log = len(server.log)
    for name, (pin, status, message) in BAD_PINS.items():
        answer = ENDPOINTS[endpoint](server, {"pad_seq_len": pin})
        assert answer.status_code == status, (name, answer.text)
        assert message in _said(answer), (name, answer.text)
    assert _files(temporary) == before, "left on disk"
    assert server.get("/v1/videos").json()["data"] == jobs, "left in the queue"
    new = server.log[log:]
    assert "packed sequence" not in new and "Traceback" not in new


def test_a_bad_pin_ends_a_session_before_it_starts(server: Server) -> None:
    for name, (pin, _, message) in BAD_PINS.items():
        start: dict[str, Any] = {"type": "session.start", "prompt": "a cat", "size": "64x64", "seconds": "4"}
        start["sampling_params"] = EXTRA | {"pad_seq_len": pin}
        with connect(f"ws://127.0.0.1:{server.port}/v1/realtime/video") as session:
            session.send(json.dumps(start))
            said = json.loads(session.recv(timeout=30))
        assert said["type"] == "error" and message in said["message"], (name, said)


def test_a_pin_that_the_prompt_makes_too_small_is_the_clients_error(server: Server, temporary: Path) -> None:
    extra = EXTRA | {"pad_seq_len": 512}
    before = _files(temporary)
    form = {**FILM, "prompt": "a cat " * 30, "extra_params": json.dumps(extra)}
    message = f"pad_seq_len is 512, expected at least 704: with its prompt the request has {KNOWN + 180} rows"
    answer = server.post("/v1/videos/sync", data=form)
    assert (answer.status_code, _said(answer)) == (400, message)
    job = server.post("/v1/videos", data=form).json()
    deadline = time.monotonic() + 60
    while (found := server.get(f"/v1/videos/{job['id']}")).json().get("status") in ("queued", "in_progress"):
        assert time.monotonic() < deadline, found.text
        time.sleep(0.1)
    assert found.json()["status"] == "failed"
    assert found.json()["error"] == {"code": 400, "message": message}
    assert _files(temporary) == before
    assert server.videos("a cat", **FILM, extra_params=extra), "the next request is served"


def test_more_than_the_longest_bucket_is_too_large(server: Server) -> None:
    for path in ("/v1/videos/sync", "/v1/videos"):
        form = {**FILM, "prompt": "a cat", "size": "384x384", "extra_params": json.dumps(EXTRA)}
        answer = server.post(path, data=form)
        rows = 32 * 144 + 2 * 178
        assert answer.status_code == 413
        assert f"needs {rows} rows, expected at most 4096" in _said(answer)
    pinned = server.video_response("a cat", **{**FILM, "size": "384x384"}, extra_params=EXTRA | {"pad_seq_len": 5120})
    assert pinned.status_code == 200, "a request's own pin wins"
