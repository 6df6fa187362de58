"""A real diffusion engine in the process of the test: the whole path of a request but HTTP."""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics

if TYPE_CHECKING:
    from typing_extensions import Self

# bf16 arithmetic in another order; two unrelated pictures of the tiny checkpoints are below 30 dB.
SAME_PICTURE_DB = 40.0
# Of 24 frames a second, which is what MiniMax-H3 takes for its shortest video of 4 s.
H3_FRAMES = 107

# What the host warns of while it serves is the host's to mend: it runs in the process of the test here.
MARKS = [pytest.mark.compose, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]

_numbers = itertools.count(1)


class Engine:
    """An engine of vLLM-Omni that loads a checkpoint, with everything that `vllm serve` would set up in it.

    Args:
        model: Folder of the checkpoint.
        compiled: Whether it compiles; its eager twin is what it is held against.
        backend: What compiles. `eager` runs what Dynamo traced as it is: it shows recompilation, graph breaks and hooks
            in a second, where `inductor` generates code for half a minute.
        **options: Fields of `OmniDiffusionConfig`. VAE decode is not compiled unless they say so.
    """

    def __init__(self, model: Path, *, compiled: bool, backend: str = "eager", **options: Any) -> None:
        from vllm_omni.diffusion.data import OmniDiffusionConfig
        from vllm_omni.diffusion.diffusion_engine import DiffusionEngine

        # Blocks of every engine share their code, and torch counts compilations by code.
        torch._dynamo.reset()
        counters.clear()
        clear_compilation_metrics()
        options = {
            "diffusion_compile_vae": False,
            "diffusion_compile_config": {"backend": backend},
            "trust_remote_code": True,
        } | options
        config = OmniDiffusionConfig.from_kwargs(model=str(model), enforce_eager=not compiled, **options)
        config.enrich_config()
        self.host = DiffusionEngine.make_engine(config)
        # The engine hands answers to the loop that was running when its own was started.
        self._loop = asyncio.new_event_loop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.host.close()
        self._loop.close()

    @property
    def worker(self) -> Any:
        """The one worker, which lives in this process."""
        return self.host.executor.driver_worker.worker

    @property
    def pipeline(self) -> Any:
        """The loaded pipeline."""
        return self.worker.model_runner.pipeline

    @property
    def blocks(self) -> list[torch.nn.Module]:
        """Transformer blocks, as the model declares them."""
        transformer = self.pipeline.transformer
        return [module for module in transformer.modules() if type(module).__name__ in transformer._repeated_blocks]

    @property
    def graphs(self) -> int:
        """Graphs compiled since this engine was made."""
        return int(counters["stats"]["unique_graphs"])

    def rank_facts(self) -> list[dict[str, Any]]:
        """What each worker has compiled, by rank; its `worker_extension_cls` has to be `RankFacts`."""
        (facts,) = self.host.collective_rpc("all_compile_facts", timeout=60)
        return list(facts)

    def rank_graphs(self) -> list[int]:
        """Graphs that each worker has compiled, by rank."""
        return [facts["graphs"] for facts in self.rank_facts()]

    def request(
        self, *, size: int = 128, steps: int = 4, seed: int = 1, prompt: str = "a cat", **parameters: Any
    ) -> Any:
        """A request; `parameters` are further fields of `OmniDiffusionSamplingParams`."""
        from vllm_omni.diffusion.request import OmniDiffusionRequest
        from vllm_omni.inputs.data import OmniDiffusionSamplingParams

        sampling = OmniDiffusionSamplingParams(
            width=size, height=size, num_inference_steps=steps, seed=seed, **parameters
        )
        return OmniDiffusionRequest(
            prompt={"prompt": prompt}, sampling_params=sampling, request_id=f"compose-{next(_numbers)}"
        )

    def draw(self, **parameters: Any) -> np.ndarray:
        """Have a picture drawn and wait for it; see `request`. Pixels from 0 to 255."""
        return _pixels(self.host.add_req_and_wait_for_response(self.request(**parameters)))

    def film(self, **parameters: Any) -> np.ndarray:
        """As `draw`, of MiniMax-H3's shortest and smallest video."""
        return self.draw(**film(**parameters))

    def together(self, requests: Sequence[Any], *, abort: Sequence[int] = ()) -> list[np.ndarray | None]:
        """Send requests at once, as the server's loop does, and abort some of them as soon as they all are in.

        From then on `draw` cannot be used: the loop owns the scheduler.

        Returns:
            What was drawn; None for a request that was aborted.
        """

        async def send() -> list[Any]:
            tasks = [asyncio.create_task(self._answer(request)) for request in requests]
            await asyncio.sleep(0.2)
            for index in abort:
                self.host.abort(requests[index].request_id)
            return await asyncio.gather(*tasks)

        outputs = self._loop.run_until_complete(send())
        return [None if output.aborted else _pixels(output) for output in outputs]

    async def _answer(self, request: Any) -> Any:
        await self.host._check_and_start_background_loop()
        return await self.host.async_add_req_and_wait_for_response(request)

    def count_block_calls(self) -> Counter[str]:
        """Count calls of the blocks from now on, by class; a cache that works leaves some of them out."""
        calls: Counter[str] = Counter()

        def count(name: str, *_: Any) -> None:
            calls[name] += 1

        for block in self.blocks:
            block.register_forward_pre_hook(partial(count, type(block).__name__))
        return calls


def film(*, steps: int = 4, quality: str | None = None, **parameters: Any) -> dict[str, Any]:
    """Parameters of `Engine.request` for MiniMax-H3's shortest and smallest video."""
    video = {"num_frames": H3_FRAMES, "extra_args": {"aspect_ratio": "1:1"}}
    return {"size": 64, "steps": steps, "quality": quality} | video | parameters


def compiled_files() -> set[str]:
    """Names of the files whose functions were compiled: the model's own, and no hook's."""
    return {Path(metrics.co_filename).name for metrics in get_compilation_metrics() if metrics.co_filename}


def parameters(function: Any) -> list[str]:
    """Names of a function's parameters: cache-dit looks at those of a block's forward."""
    return list(inspect.signature(function).parameters)


def psnr_db(picture: np.ndarray, reference: np.ndarray) -> float:
    """Peak signal-to-noise ratio of pictures with pixels from 0 to 255."""
    assert picture.shape == reference.shape
    error = float(np.mean((picture - reference) ** 2))
    return float("inf") if error == 0 else 10 * float(np.log10(255**2 / error))


def assert_same(pictures: Sequence[np.ndarray], references: Sequence[np.ndarray]) -> None:
    """Check that pictures are those of the eager twin."""
    assert len(pictures) == len(references)
    found = [round(psnr_db(picture, reference), 1) for picture, reference in zip(pictures, references, strict=True)]
    assert min(found) >= SAME_PICTURE_DB, f"PSNR against eager, dB: {found}"


def _pixels(output: Any) -> np.ndarray:
    if output.error:
        raise RuntimeError(output.error)
    tensor = output.output[0] if isinstance(output.output, tuple) else output.output
    if tensor.is_floating_point():  # pictures leave the engine in -1 to 1, before the server makes files of them
        tensor = (tensor.float().clamp(-1, 1) + 1) * 127.5
    return np.asarray(tensor.cpu().numpy(), dtype=np.float64)
