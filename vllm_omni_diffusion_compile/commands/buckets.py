"""`vllm-omni-compile buckets`: from the requests of a deployment to the packed lengths that waste least on them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_omni_diffusion_compile.errors import RequestError, SettingError
from vllm_omni_diffusion_compile.settings import CONFIG, aligned, read_config

if TYPE_CHECKING:
    from vllm_omni_diffusion_compile.packed_length.buckets import Buckets
    from vllm_omni_diffusion_compile.packed_length.plan import BucketUse
    from vllm_omni_diffusion_compile.packed_length.rows import Shape
    from vllm_omni_diffusion_compile.packed_length.trace import Demand

HELP = "plan MiniMax-H3's packed lengths: rows of requests, and the buckets that pad them least"

_KEY = "pad_seq_buckets"
# For one shape and no buckets: how many prompt rows those shown leave at least.
_PROMPT_LADDER = (1, 64, 128, 256, 512, 1024, 2048)
_JSON_PARTS = 4096
_PLOT_BINS = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    requests = parser.add_argument_group("requests, from any of")
    requests.add_argument("--shape", metavar="WxH", action="append", default=[], help="size of a request, in pixels")
    requests.add_argument("--shapes", metavar="FILE", type=Path, help="YAML: a list of mappings with a trace's keys")
    requests.add_argument(
        "--trace", metavar="FILE", type=Path, action="append", default=[],
        help="JSON lines, or CSV with a header (*.csv): width, height and, as far as they apply, task, frames or "
        "seconds, keyframes, references, prompt_rows, count",
    )  # fmt: skip
    shape = parser.add_argument_group("with --shape")
    shape.add_argument("--task", metavar="TASK", help="t2va, fl2va or ref2va; else what keyframes and references say")
    shape.add_argument("--frames", metavar="N", help="frames asked for")
    shape.add_argument("--seconds", metavar="S", help="or the length, at 24 frames a second")
    shape.add_argument("--keyframes", metavar="N", help="of FL2VA: 1 or 2")
    shape.add_argument(
        "--reference", metavar="R", action="append", default=[],
        help="of Ref2VA, as it is encoded: image:1024x768, audio:3.5s, video:640x352:56 (frames), or with sound "
        "video:640x352:56:2.3s",
    )  # fmt: skip
    shape.add_argument("--prompt-rows", metavar="N", default="0", help="tokens of the prompt")
    buckets = parser.add_mutually_exclusive_group()
    buckets.add_argument("--count", metavar="K", type=int, help="plan at most K buckets, with the least padding")
    buckets.add_argument(
        "--waste", metavar="W", type=float, help="plan the fewest buckets that keep padding to a share"
    )
    buckets.add_argument("--buckets", metavar="LIST", help=f"take these: 16384,32768, or {_KEY} as JSON")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw the rows and the buckets (PNG)")
    parser.add_argument("--json", action="store_true", help="print JSON: requests in order, buckets, padding")


def run(options: argparse.Namespace) -> int:
    """Plan and print; return the exit status.

    Raises:
        RequestError: No requests, or one that cannot be.
        SettingError: Buckets that cannot be.
    """
    from vllm_omni_diffusion_compile.packed_length.buckets import Buckets
    from vllm_omni_diffusion_compile.packed_length.plan import plan_count, plan_waste, uses
    from vllm_omni_diffusion_compile.packed_length.trace import Demand

    shapes = list(_shapes(options))
    demand = Demand()
    demand.add_shapes(((shape, 1) for shape in shapes), "--shape: ")
    if options.shapes is not None:
        _add_yaml(demand, options.shapes)
    for trace in options.trace:
        demand.add_trace(trace)
    if not demand.used_rows:
        raise RequestError("there are no requests; give --shape WxH, --shapes FILE or --trace FILE")
    planned = options.count is not None or options.waste is not None
    alone = shapes if not planned and len(demand.used_rows) == len(shapes) else []
    if options.buckets is not None:
        buckets = _given(options.buckets)
    elif options.count is not None:
        buckets = Buckets(plan_count(demand.requests, options.count))
    elif options.waste is not None:
        buckets = Buckets(plan_waste(demand.requests, options.waste))
    elif alone:
        buckets = _ladder(alone)
    else:
        raise RequestError("say what is wanted of the buckets: --count K, --waste W, or --buckets LIST to judge those")
    used = uses(demand.requests, buckets)
    if options.json:
        _print_json(demand, buckets, used)
    elif alone:
        _print_shapes(alone, buckets)
    else:
        _print_plan(demand, buckets, used)
    if options.plot is not None:
        _plot(demand, buckets, options.plot)
    return 0


def _shapes(options: argparse.Namespace) -> Iterator[Shape]:
    from vllm_omni_diffusion_compile.packed_length.reading import read_shape, read_size

    about = {
        "task": options.task,
        "frames": options.frames,
        "seconds": options.seconds,
        "keyframes": options.keyframes,
        "references": options.reference,
        "prompt_rows": options.prompt_rows,
    }
    for text in options.shape:
        width, height = read_size(text, "--shape")
        yield read_shape({"width": width, "height": height, **about}, "--")


def _add_yaml(demand: Demand, path: Path) -> None:
    import yaml

    from vllm_omni_diffusion_compile.packed_length.reading import read_shapes

    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RequestError(f"--shapes {path}: {error}") from None
    demand.add_shapes(read_shapes(given, str(path)), f"{path}: ")


def _given(text: str) -> Buckets:
    from vllm_omni_diffusion_compile.packed_length.buckets import Buckets

    try:
        value = json.loads(text if text.lstrip().startswith(("[", "{")) else f"[{text}]")
    except ValueError as error:
        raise SettingError(f"--buckets is {text!r}, expected numbers such as 16384,32768, or JSON: {error}") from None
    setting = read_config({_KEY: value}, "--buckets").pad_seq_buckets
    assert setting is not None
    return Buckets.of(setting)


def _ladder(shapes: Sequence[Shape]) -> Buckets:
    """Return the lengths worth knowing of where no bucket was asked for: those that leave room for some prompts."""
    from vllm_omni_diffusion_compile.packed_length.buckets import Buckets

    used = [shape.used_rows for shape in shapes]
    longest = max(used)
    return Buckets(
        tuple(sorted({aligned(rows) for rows in used} | {aligned(longest + rows) for rows in _PROMPT_LADDER}))
    )


def _print_json(demand: Demand, buckets: Buckets, used: Sequence[BucketUse]) -> None:
    """Print one document. Its requests are written piece by piece: there may be a million."""
    write = sys.stdout.write
    texts: dict[int, str] = {}
    for rows in demand.requests:
        entry = {"used_rows": rows, "packed_rows": aligned(rows), "bucket": buckets.covering(rows) or aligned(rows)}
        texts[rows] = json.dumps(entry)
    write('{"requests": [')
    for start in range(0, len(demand.used_rows), _JSON_PARTS):
        part = ", ".join([texts[rows] for rows in demand.used_rows[start : start + _JSON_PARTS]])
        write(f", {part}" if start else part)
    rest = {
        "buckets": list(buckets.lengths),
        "padded_rows": sum(use.padded_rows for use in used),
        "mean_waste": _mean_waste(used),
    }
    write(f"], {json.dumps(rest)[1:]}\n")


def _mean_waste(used: Sequence[BucketUse]) -> float:
    """Return the share of all rows that is padding."""
    padded = sum(use.padded_rows for use in used)
    return padded / (padded + sum(use.used_rows for use in used))


def _print_shapes(shapes: Sequence[Shape], buckets: Buckets) -> None:
    from vllm_omni_diffusion_compile.packed_length.rows import FPS, snapped_frames

    for shape in shapes:
        bare = shape.used_rows - shape.prompt_rows
        frames = "the model's own length" if shape.frames is None else f"{snapped_frames(shape.frames)} frames"
        seconds = "" if shape.frames is None else f" ({snapped_frames(shape.frames) / FPS:.2f} s)"
        print(f"{shape.task} {shape.width}x{shape.height}, {frames}{seconds}: {bare} rows without the prompt")
        if shape.prompt_rows:
            print(f"with {shape.prompt_rows} prompt rows: {shape.used_rows} used, {shape.packed_rows} packed")
        table = _table("bucket", "prompt rows it leaves", "waste with none of them")
        for length in buckets.lengths:
            left = length - bare
            table.add_row(
                f"{length}", f"{left}" if left > 0 else "too short", f"{left / length:.1%}" if left > 0 else ""
            )
        _print_table(table)


def _print_plan(demand: Demand, buckets: Buckets, used: Sequence[BucketUse]) -> None:
    exact = sum(rows**2 * count for rows, count in demand.requests.items())
    table = _table("bucket", "requests", "mean waste", "worst waste", "attention cost")
    for use in used:
        own = "" if use.length in buckets.lengths else " (none holds it)"
        if use.requests:
            table.add_row(
                f"{use.length}{own}", f"{use.requests}", f"{use.mean_waste:.1%}", f"{use.worst_waste:.1%}",
                f"{use.attention_cost:.3g}",
            )  # fmt: skip
        else:
            table.add_row(f"{use.length}", "0", "", "", "")
    _print_table(table)
    requests = sum(demand.requests.values())
    cost = sum(use.attention_cost for use in used)
    padded = sum(use.padded_rows for use in used)
    print(
        f"{requests} request(s) of {min(demand.requests)} to {max(demand.requests)} rows: {padded} padded rows, "
        f"{_mean_waste(used):.1%} of all; attention costs {cost / exact:.2f} times what it would without padding "
        "(rows squared)"
    )
    print(f"\n{CONFIG}:\n  {_KEY}: [{', '.join(map(str, buckets.lengths))}]")


def _table(*columns: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _print_table(table: Any) -> None:
    from rich.console import Console

    Console(highlight=False, soft_wrap=True).print(table)


def _plot(demand: Demand, buckets: Buckets, path: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SettingError(
            f"--plot needs matplotlib ({error}); install it, or this package with its extra: "
            "pip install 'vllm-omni-diffusion-compile[plot]'"
        ) from None

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    rows = sorted(demand.requests)
    axes.hist(rows, bins=min(_PLOT_BINS, len(rows)), weights=[demand.requests[used] for used in rows], color="#4477aa")
    for index, length in enumerate(buckets.lengths):
        axes.axvline(length, color="#cc3311", linewidth=1, label=None if index else "buckets")
    axes.set(xlabel="rows of a request", ylabel="requests", title="Rows of the requests, and the buckets above them")
    axes.legend(loc="upper left")
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise SettingError(f"--plot {path}: {error.strerror or error}") from None
