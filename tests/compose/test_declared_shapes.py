"""Declared shapes on real engines: nothing is compiled for them afterwards, and what goes wrong costs its own shape."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.compose.engine import H3_FRAMES, MARKS, Engine, film
from vllm_omni_diffusion_compile.compile.events import LOG, CompileEvent

pytestmark = MARKS

STATIC: dict[str, Any] = {"diffusion_compile_dynamic": False}


def config(*shapes: Any, **more: Any) -> dict[str, Any]:
    return {"diffusion_compile_config": {"backend": "eager", "warmup": {"shapes": list(shapes), **more}}}


def after_ready() -> list[CompileEvent]:
    return [event for event in LOG.since()[0] if event.after_ready]


@pytest.fixture(autouse=True)
def events() -> None:
    LOG.clear()


def picture(seed: int, size: int = 320) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8))


def sized(request: Any, width: int, height: int) -> Any:
    request.sampling_params.width, request.sampling_params.height = width, height
    return request


def test_nothing_is_compiled_for_a_declared_shape_in_the_thread_that_serves(klein: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    shapes = ("128x128", {"width": 192, "height": 128, "guidance_scale": 4.0, "negative_prompt": "dull"}, "96x160")
    with Engine(klein, compiled=True, **STATIC, **config(*shapes, report_path=str(path))) as engine:
        report = json.loads(path.read_text())
        assert [shape["state"] for shape in report["shapes"]] == ["warm"] * 3
        assert all(shape["compile_events"] > 0 for shape in report["shapes"])
        # What vLLM's renderers do for a moment, just when the engine's own thread is made.
        threads = torch.get_num_threads()
        torch.set_num_threads(threads + 1)
        requests = [
            engine.request(size=128),
            sized(engine.request(guidance_scale=4.0), 192, 128),
            sized(engine.request(steps=7, prompt="a longer prompt than the one before"), 96, 160),
        ]
        requests[1].prompt["negative_prompt"] = "something else"
        try:
            assert all(drawn is not None for drawn in engine.together(requests))
        finally:
            torch.set_num_threads(threads)
        assert after_ready() == []

        engine.together([engine.request(size=64, steps=3)])
        waited = after_ready()
        assert waited and all(event.request is not None for event in waited)
        asked = waited[0].request
        assert asked is not None and (asked["width"], asked["height"], asked["steps"]) == (64, 64, 3)


def test_text_and_keyframes_of_a_model_that_has_no_warmup_of_its_own(h3: Path) -> None:
    # Rows depend on the prompt: one of as many tokens, of a letter each, as that of the requests below.
    video = {"width": 64, "height": 64, "frames": H3_FRAMES, "prompt_rows": len("a cat")}
    shapes = (video, video | {"images": ["320x320"]}, video | {"images": ["320x320", "320x320"]})
    with Engine(h3, compiled=True, **STATIC, **config(*shapes)) as engine:
        requests = [engine.request(**film()) for _ in shapes]
        requests[1].prompt["multi_modal_data"] = {"image": picture(1)}
        requests[2].prompt["multi_modal_data"] = {"image": [picture(1), picture(2)]}
        assert all(drawn is not None for drawn in engine.together(requests))
        assert after_ready() == []


def test_reference_pictures_of_the_other_partition(h3: Path) -> None:
    video = {"width": 64, "height": 64, "frames": H3_FRAMES, "prompt_rows": len("a cat"), "images": ["320x320"]}
    with Engine(h3.with_name("Ref2VA"), compiled=True, **STATIC, **config(video)) as engine:
        request = engine.request(**film())
        request.prompt["multi_modal_data"] = {"image": picture(1)}
        assert engine.together([request])[0] is not None
        assert after_ready() == []


def test_a_shape_without_memory_and_one_that_hangs_cost_nothing_but_themselves(
    klein: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_omni.diffusion.models.flux2_klein.pipeline_flux2_klein import Flux2KleinPipeline

    forward = Flux2KleinPipeline.forward
    release = threading.Event()

    def troubled(self: Any, batch: Any) -> Any:
        width = batch.sampling_params.width
        if width == 4096:
            raise torch.OutOfMemoryError("tried to allocate 80 GiB")
        if width == 256:
            release.wait(120)
        return forward(self, batch)

    monkeypatch.setattr(Flux2KleinPipeline, "forward", troubled)
    path = tmp_path / "report.json"
    shapes = ("4096x64", "128x128", "256x256", "64x64")
    with Engine(klein, compiled=True, **STATIC, **config(*shapes, budget_s=30, report_path=str(path))) as engine:
        states = {shape["name"]: shape["state"] for shape in json.loads(path.read_text())["shapes"]}
        assert states == {"4096x64": "failed", "128x128": "warm", "256x256": "gave up", "64x64": "skipped"}
        # A user's request waits for the one that hangs, and is answered like any other.
        release.set()
        assert engine.together([engine.request(size=128)])[0] is not None
        assert after_ready() == []
