"""Packed lengths of MiniMax-H3 with static shapes: what random prompts make a server compile, with buckets and without.

Both arms get the same requests, of random prompt lengths and three sizes, on the tiny checkpoint. Ours has as many
buckets as asked for, planned from the requests, and one pinned warmup request for each; stock is the release alone, and
its warmup is one request of each size. Run it with

    python -m tools.benchmarks.packed_lengths
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SIZES = ((64, 64), (96, 64), (96, 96))
SECONDS = 4
STEPS = 3
# The tiny tokenizer makes a token of each byte.
LONGEST_PROMPT = 400
STOCK_PLUGINS = "diffusion_cpu,vllm_omni_register_models"


def requests(count: int, seed: int) -> list[dict[str, Any]]:
    """Return width, height and prompt length of random requests."""
    draw = random.Random(seed)
    drawn = [(*draw.choice(SIZES), draw.randint(1, LONGEST_PROMPT)) for _ in range(count)]
    return [{"width": width, "height": height, "prompt": prompt} for width, height, prompt in drawn]


def plan(asked: Sequence[dict[str, Any]], count: int) -> list[int]:
    """Return the buckets that pad the requests least."""
    from vllm_omni_diffusion_compile.packed_length.plan import plan_count
    from vllm_omni_diffusion_compile.packed_length.rows import FPS, Shape

    used: dict[int, int] = {}
    for one in asked:
        shape = Shape(
            task="t2va",
            width=one["width"],
            height=one["height"],
            frames=SECONDS * FPS,
            prompt_rows=one["prompt"],
        )
        used[shape.used_rows] = used.get(shape.used_rows, 0) + 1
    return list(plan_count(used, count))


def arm(given: dict[str, Any]) -> dict[str, Any]:
    """Run one arm in this process and return what it measured."""
    buckets: list[int] = given["buckets"]
    if buckets:
        from vllm_omni_diffusion_compile.plugin import register

        register()
    from torch._dynamo.utils import counters
    from vllm_omni.diffusion.data import OmniDiffusionConfig
    from vllm_omni.diffusion.diffusion_engine import DiffusionEngine
    from vllm_omni.diffusion.request import OmniDiffusionRequest
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

    ours = {"diffusion_compile_vae": False, "diffusion_compile_config": {"pad_seq_buckets": buckets}} if buckets else {}
    config = OmniDiffusionConfig.from_kwargs(
        model=given["model"], trust_remote_code=True, diffusion_compile_dynamic=False, **ours
    )
    config.enrich_config()
    engine = DiffusionEngine.make_engine(config)
    lengths: set[int] = set()
    transformer = engine.executor.driver_worker.worker.model_runner.pipeline.transformer
    transformer.register_forward_pre_hook(
        lambda _, __, kwargs: lengths.add(int(kwargs["x"].shape[1])), with_kwargs=True
    )

    def send(number: int, one: dict[str, Any], extra: dict[str, Any]) -> float:
        sampling = OmniDiffusionSamplingParams(
            width=one["width"], height=one["height"], num_frames=SECONDS * 24 + 11, num_inference_steps=STEPS, seed=1,
            extra_args={"aspect_ratio": "1:1", **extra},
        )  # fmt: skip
        request = OmniDiffusionRequest(
            prompt={"prompt": "x" * one["prompt"]}, sampling_params=sampling, request_id=f"benchmark-{number}"
        )
        start = time.perf_counter()
        answer = engine.add_req_and_wait_for_response(request)
        if answer.error:
            raise RuntimeError(answer.error)
        return time.perf_counter() - start

    warm = [({"width": 64, "height": 64, "prompt": 1}, {"pad_seq_len": bucket}) for bucket in buckets] or [
        ({"width": width, "height": height, "prompt": 50}, {}) for width, height in SIZES
    ]
    warmup = sum(send(-number, one, extra) for number, (one, extra) in enumerate(warm, 1))
    compiled = counters["stats"]["unique_graphs"]
    lengths.clear()
    seconds = [send(number, one, {}) for number, one in enumerate(given["requests"])]
    measured = {
        "buckets": buckets,
        "warmup_s": warmup,
        "graphs_in_warmup": compiled,
        "graphs_after_warmup": counters["stats"]["unique_graphs"] - compiled,
        "packed_lengths": sorted(lengths),
        "median_s": statistics.median(seconds),
        "worst_s": max(seconds),
        "total_s": sum(seconds),
    }
    engine.close()
    return measured


def _run_arm(given: dict[str, Any], plugins: str | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        env = dict(os.environ) | {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "HF_MODULES_CACHE": f"{folder}/modules",
        }
        env.pop("VLLM_PLUGINS", None)
        if plugins is not None:
            env["VLLM_PLUGINS"] = plugins
        command = [sys.executable, "-m", "tools.benchmarks.packed_lengths", "--arm", json.dumps(given)]
        subprocess.run([*command, "--result", str(result)], env=env, check=True, stdout=subprocess.DEVNULL)
        measured = json.loads(result.read_text(encoding="utf-8"))
        assert isinstance(measured, dict)
        return measured


def main() -> None:
    """Run both arms and print what they measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=40, help="how many (default: %(default)s)")
    parser.add_argument("--buckets", type=int, default=4, help="of ours, at most (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the random requests (default: %(default)s)")
    parser.add_argument("--model", help="folder of a MiniMax-H3 partition (default: the tiny one)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm is not None:
        options.result.write_text(json.dumps(arm(json.loads(options.arm))), encoding="utf-8")
        return
    if options.model is None:
        from tools.tiny_checkpoints.checkpoint import made

        options.model = str(made("minimax_h3") / "FL2VA")
    asked = requests(options.requests, options.seed)
    given = {"model": options.model, "requests": asked}
    arms = {
        "buckets": _run_arm({**given, "buckets": plan(asked, options.buckets)}, None),
        "stock": _run_arm({**given, "buckets": []}, STOCK_PLUGINS),
    }
    if options.json:
        print(json.dumps({"requests": len(asked), "arms": arms}, indent=2))
        return
    print(f"{len(asked)} requests of random prompt lengths and {len(SIZES)} sizes, static shapes")
    for name, value in arms["buckets"].items():
        print(f"{name:>20}  {_shown(value):>28}  {_shown(arms['stock'][name]):>28}")


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, list):
        return f"{len(value)} lengths" if len(value) > 5 else " ".join(map(str, value)) or "none"
    return str(value)


if __name__ == "__main__":
    main()
