"""What the fallback wrapper adds to a call that does not fail.

A function, a method of an image VAE and one of a video VAE, each bare and under the wrapper, in turn in one process, so
that the machine's drift hits all alike. Run it with

    python -m tools.benchmarks.fallback_overhead
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from vllm_omni_diffusion_compile.compile.fallback import FallbackCallable
from vllm_omni_diffusion_compile.compile.latch import Failure, Latch

CALLS = 2000


class Decoder(torch.nn.Module):
    """An image VAE: attributes, and nothing that a call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.use_slicing = self.use_tiling = False
        self.tile_sample_min_size, self.tile_latent_min_size, self.tile_overlap_factor = 512, 64, 0.25

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        """Next to nothing, so that what is left is the wrapper."""
        return z + 1


class CachingDecoder(Decoder):
    """A video VAE: a feature cache and an index, which are copied before every call."""

    def __init__(self) -> None:
        super().__init__()
        self.feat_cache: list[torch.Tensor | None] = [None] * 32
        self.conv_idx = [0]


def _fail(failure: Failure) -> None:
    raise RuntimeError("the benchmark's function failed") from failure.error


def _pair(function: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Compile once, so that both arms meet the same guards: bare, and under the wrapper."""
    compiled = torch.compile(function, backend="eager")
    return compiled, FallbackCallable(function, compiled, Latch("benchmark", _fail))


def _microseconds(call: Callable[..., Any], z: torch.Tensor) -> float:
    # CPU time, since a busy machine takes the process off its core in the middle of a round.
    start = time.process_time()
    for _ in range(CALLS):
        call(z)
    return (time.process_time() - start) / CALLS * 1e6


def main() -> None:
    """Print the medians and the differences, in microseconds a call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31, help="rounds of all arms (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()

    def decode(z: torch.Tensor) -> torch.Tensor:
        return z + 1

    pairs = {
        "a function": _pair(decode),
        "a method": _pair(Decoder().decode),
        "a method with a cache": _pair(CachingDecoder().decode),
    }
    torch.set_num_threads(1)
    z = torch.zeros(1)
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in pairs}
    for warm in (True, *[False] * options.rounds):
        for name, (bare, wrapped) in pairs.items():
            sample = _microseconds(bare, z), _microseconds(wrapped, z)
            if not warm:
                samples[name].append(sample)
    result = {
        name: {
            "bare": statistics.median(bare for bare, _ in values),
            "wrapped": statistics.median(wrapped for _, wrapped in values),
            "added": statistics.median(wrapped - bare for bare, wrapped in values),
        }
        for name, values in samples.items()
    }
    if options.json:
        print(json.dumps({"microseconds": result}))
        return
    print(f"{'microseconds a call, medians':32s}{'bare':>9s}{'wrapped':>9s}{'added':>9s}")
    for name, row in result.items():
        print(f"{name:32s}{row['bare']:9.2f}{row['wrapped']:9.2f}{row['added']:9.2f}")


if __name__ == "__main__":
    main()
