"""Whether ready means ready: the first request of a declared shape against the next ten, and against an eager server.

For each combination of model, scope and kind of shapes two servers run at once, one that compiles and has three shapes
declared, and one that is eager. Each shape's first request is timed, then ten more, in turn on both. What is judged are
compile events after ready, which have to be none, and how far the first request is above the median of the next ten,
which has to be about as far as on the eager server. Run it on a quiet machine with

    python -m tools.benchmarks.ready klein --scope regional --shapes static
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.serve.server import Server
from tools.tiny_checkpoints.checkpoint import made

# A first start compiles for minutes.
READY_S = 1800.0
NEXT = 10
# How far the ratio may be above the eager server's.
ALLOWED = 0.15
PROMPT = "a cat"
_AFTER_READY = re.compile(
    r'^vllm_omni:diffusion_compile_compilations_total\{.*after_ready="true".*\} (\S+)$', re.MULTILINE
)


@dataclass(frozen=True)
class Model:
    """A tiny model and the three shapes that are declared and asked for.

    Args:
        checkpoint: Module of `tools.tiny_checkpoints`.
        folder: What is served, below its folder.
        options: Of the server.
        shapes: As in `warmup.shapes`.
        request: Asks a server for a shape.
    """

    checkpoint: str
    folder: str
    options: tuple[str, ...]
    shapes: tuple[dict[str, Any], ...]
    request: Callable[[Server, dict[str, Any]], object]


def _image(server: Server, shape: dict[str, Any]) -> object:
    size = f"{shape['width']}x{shape['height']}"
    return server.images(PROMPT, size=size, num_inference_steps=shape["steps"], seed=1, n=1)


def _video(server: Server, shape: dict[str, Any]) -> object:
    size = f"{shape['width']}x{shape['height']}"
    return server.videos(
        PROMPT, size=size, num_inference_steps=shape["steps"], seed=1, seconds=4, fps=24, extra_params=_SQUARE
    )


_SQUARE = {"aspect_ratio": "1:1"}


def _shapes(sizes: Sequence[str], **more: Any) -> tuple[dict[str, Any], ...]:
    return tuple(dict(zip(("width", "height"), map(int, size.split("x")), strict=True)) | more for size in sizes)


MODELS = {
    "klein": Model("klein", "", (), _shapes(("256x256", "192x256", "320x192"), steps=4), _image),
    "minimax_h3": Model(
        "minimax_h3", "FL2VA", ("--trust-remote-code",),
        # 107 frames are its shortest video; without padding its rows depend on the prompt, a token for each letter.
        _shapes(("64x64", "96x64", "128x96"), frames=107, steps=4, prompt_rows=len(PROMPT), extra_args=_SQUARE),
        _video,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one shape cost in one combination.

    Args:
        combination: Model, scope and kind of shapes.
        size: Of the shape.
        seconds: Of each request, by arm, the first one first.
    """

    combination: str
    size: str
    seconds: dict[str, list[float]]

    def ratio(self, arm: str) -> float:
        """First request over the median of the next ten."""
        first, *following = self.seconds[arm]
        return first / statistics.median(following)

    def highest(self, arm: str) -> float:
        """The slowest of the next ten over their median: what the machine adds by itself."""
        _, *following = self.seconds[arm]
        return max(following) / statistics.median(following)

    @property
    def above_eager(self) -> float:
        """How far our ratio is above the eager server's."""
        return self.ratio("ours") - self.ratio("eager")


def measure(model: Model, combination: str, options: Sequence[str]) -> tuple[list[Result], dict[str, Any]]:
    """Run both servers; return what each shape cost, and what ours says of its start."""
    config = json.dumps({"warmup": {"shapes": model.shapes}})
    checkpoint = made(model.checkpoint) / model.folder
    with ExitStack() as stack:
        servers = {
            arm: stack.enter_context(Server(checkpoint, *model.options, *arguments, ready_timeout_s=READY_S))
            for arm, arguments in (
                ("eager", ("--enforce-eager",)),
                ("ours", (*options, "--diffusion-compile-config", config)),
            )
        }
        results = []
        for index, shape in enumerate(model.shapes):
            # Nor does one of them always have the first request of a shape.
            results.append(_shape(model, shape, combination, dict(list(servers.items())[:: 1 if index % 2 else -1])))
        ours = servers["ours"]
        about = {
            "combination": combination,
            "ready_s": {arm: server.startup_s for arm, server in servers.items()},
            "events_after_ready": sum(float(count) for count in _AFTER_READY.findall(ours.get("/metrics").text)),
            "report": ours.get("/v1/diffusion_compile/report").json(),
        }
    return results, about


def _shape(model: Model, shape: dict[str, Any], combination: str, servers: dict[str, Server]) -> Result:
    seconds: dict[str, list[float]] = {arm: [] for arm in servers}
    for turn in range(1 + NEXT):
        # Who begins changes, so that neither always runs in the other's wake.
        for arm in list(servers)[:: 1 if turn % 2 else -1]:
            start = time.perf_counter()
            model.request(servers[arm], shape)
            seconds[arm].append(time.perf_counter() - start)
    return Result(
        combination=combination,
        size=f"{shape['width']}x{shape['height']}",
        seconds=seconds,
    )


def main() -> None:
    """Measure the combinations that the command line names, and say which of them hold."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)} (default: all)")
    parser.add_argument("--scope", choices=("regional", "full"), action="append", help="default: both")
    parser.add_argument("--shapes", choices=("static", "dynamic"), action="append", help="default: both")
    parser.add_argument("--json", type=Path, help="also write everything there")
    arguments = parser.parse_args()
    unknown = set(arguments.models) - set(MODELS)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: expected {', '.join(MODELS)}")
    table = Table(
        "combination", "shape", "first / next ten", "slowest of them", "eager", "slowest of them", "above eager",
        "events after ready", "holds",
        title=f"First request over the median of the next {NEXT}",
    )  # fmt: skip
    written: list[dict[str, Any]] = []
    for name, scope, kind in itertools.product(
        arguments.models or MODELS, arguments.scope or ("regional", "full"), arguments.shapes or ("static", "dynamic")
    ):
        combination = f"{name} {scope} {kind}"
        options = ("--diffusion-compile-granularity", scope) + (
            ("--no-diffusion-compile-dynamic",) * (kind == "static")
        )
        results, about = measure(MODELS[name], combination, options)
        for result in results:
            holds = result.above_eager <= ALLOWED and about["events_after_ready"] == 0
            table.add_row(
                combination, result.size, f"{result.ratio('ours'):.3f}", f"{result.highest('ours'):.3f}",
                f"{result.ratio('eager'):.3f}", f"{result.highest('eager'):.3f}",
                f"{result.above_eager:+.3f}", f"{about['events_after_ready']:.0f}", "yes" if holds else "no",
            )  # fmt: skip
        written.append(about | {"shapes": [asdict(result) for result in results]})
        if arguments.json:  # what is measured is not lost with what fails later
            arguments.json.write_text(json.dumps(written, indent=1))
    Console().print(table)


if __name__ == "__main__":
    main()
