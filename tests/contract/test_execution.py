"""What a worker knows of the requests that it executes: the shape to declare, and prompts of a length."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

from vllm_omni_diffusion_compile.compile.events import LOG, CompileEvent
from vllm_omni_diffusion_compile.settings import Shape
from vllm_omni_diffusion_compile.upstream import execution, metrics
from vllm_omni_diffusion_compile.warmup.report import as_yaml

pytestmark = pytest.mark.contract


class Tokenizer:
    """One token a letter, and one to begin with."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [0, *map(ord, text)]}


def worker(tokenizer: Any = None) -> Any:
    return SimpleNamespace(model_runner=SimpleNamespace(pipeline=SimpleNamespace(tokenizer=tokenizer)))


@pytest.mark.parametrize("rows", [1, 2, 3, 30, 77, 512])
def test_a_prompt_has_as_many_tokens_as_asked_for(rows: int) -> None:
    text, reached = execution.diffusion_compile_prompt(worker(Tokenizer()), rows, "unused")
    assert reached == len(Tokenizer()(text)["input_ids"])
    assert reached == (rows if rows > 1 else 2)  # an empty prompt is no request


def test_a_model_without_a_tokenizer_gets_the_sentence() -> None:
    assert execution.diffusion_compile_prompt(worker(), 77, "a sentence") == ("a sentence", None)


def request(**parameters: Any) -> Any:
    pictures = [Image.new("RGB", (320, 256)), Image.new("RGB", (64, 32))]
    prompt = {"prompt": "my secret", "negative_prompt": "my other one", "multi_modal_data": {"image": pictures}}
    params = OmniDiffusionSamplingParams(width=64, height=32, **parameters)
    return OmniDiffusionRequest(prompt=prompt, sampling_params=params, request_id="x")


def test_a_request_is_described_as_the_shape_to_declare_and_keeps_its_words_to_itself() -> None:
    extra_args = {
        "task": "fl2va",
        "aspect_ratio": "1:1",
        "system_prompt": "my third secret",
        "video_path": "/my/secret.mp4",
        "seconds": 4.0,
        "x": [1],
    }
    asked = request(num_frames=107, num_inference_steps=4, guidance_scale=5.0, extra_args=extra_args)
    described = execution.described(worker(Tokenizer()), asked)
    assert described == {
        "width": 64,
        "height": 32,
        "frames": 107,
        "steps": 4,
        "guidance_scale": 5.0,
        "negative_prompt": "low quality",
        "images": ["320x256", "64x32"],
        "prompt_rows": 10,
        "extra_args": {"task": "fl2va", "aspect_ratio": "1:1", "seconds": 4.0},
    }
    assert "secret" not in json.dumps(described)


def test_a_request_that_states_little_is_described_by_that_and_can_be_pasted(caplog: pytest.LogCaptureFixture) -> None:
    extra_args = {"n\nWARNING forged": 1, "my words": 2, "x": float("nan")}
    params = OmniDiffusionSamplingParams(num_inference_steps=2, extra_args=extra_args)
    asked = OmniDiffusionRequest(prompt="", sampling_params=params, request_id="x")
    described = execution.described(worker(), asked)
    assert described == {"steps": 2}
    waited = CompileEvent(kind="compilation", component="vae", region="decode", request=described, after_ready=True)
    metrics.say_request_waited(waited, dynamic=True)
    (pasted,) = yaml.safe_load(caplog.messages[-1].rpartition("warmup.shapes:\n")[2])
    assert Shape(**pasted) == Shape(steps=2)


def test_the_shape_to_declare_names_the_adapter_of_the_request() -> None:
    from vllm.lora.request import LoRARequest

    def lora(name: str, **parameters: Any) -> Any:
        asked = request(lora_request=LoRARequest(name, 7, "/adapters/style"), **parameters)
        return execution.described(worker(), asked).get("lora")

    assert execution.described(worker(), request()).get("lora") is None
    assert lora("style") == {"name": "style", "path": "/adapters/style"}
    assert lora("style", lora_scale=0.5) == {"name": "style", "path": "/adapters/style", "scale": 0.5}
    assert lora("in my own words") == {"path": "/adapters/style"}
    # vLLM-Omni switches every adapter off.
    assert lora("style", lora_scale=0.0) is None

    described = execution.described(worker(), request(lora_request=LoRARequest("style", 7, "/adapters/style")))
    (pasted,) = yaml.safe_load(as_yaml(described))
    assert Shape(**pasted).lora is not None


def test_an_event_after_ready_names_the_request_that_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    LOG.clear()
    executor = worker(Tokenizer())
    with execution.executing(executor, (request(), None)):
        before = LOG.record("compilation", "transformer", "Block")
        LOG.ready = True
        after = LOG.record("compilation", "transformer", "Block")
    assert before.request is None
    assert after.request is not None and after.request["width"] == 64
    assert CompileEvent.from_dict(json.loads(json.dumps(after.as_dict()))).request == after.request
    (usage,) = [execution.diffusion_compile_usage(executor)]
    assert len(usage["executions"]) == 1 and usage["events"] == 2
    LOG.clear()


def test_a_service_thread_computes_with_as_many_threads_as_the_first_request_found() -> None:
    before = torch.get_num_threads()
    executor = worker()
    try:
        torch.set_num_threads(2)
        with execution.executing(executor, ()):
            pass
        seen: list[int] = []

        def serve() -> None:
            with execution.executing(executor, ()):
                seen.append(torch.get_num_threads())

        torch.set_num_threads(1)  # as a renderer of vLLM does for a moment
        thread = threading.Thread(target=serve)
        thread.start()
        thread.join()
        assert seen == [2]
    finally:
        torch.set_num_threads(before)
