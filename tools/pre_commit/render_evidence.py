"""Render `docs/evidence.md` from the rows of `docs/evidence/*.jsonl`; called by `render_docs`."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from vllm_omni_diffusion_compile.commands.qualify import nearest
from vllm_omni_diffusion_compile.evidence import Row, read_rows

_INTRO = """\
# Evidence

Which combinations were tried, on what, with which result. Nothing here is inferred: every row was written by a program
that ran the combination, and the files under `docs/evidence/` hold all of it.

| State | Meaning |
|---|---|
| validated | it ran, every figure is within its bound, and what was asked for was seen to run |
| failed | it ran, or should have, and did not hold; the reason says what |
| rejected | it is refused by design, with this error |
| not tested | it was declared, and could not run there |

A combination is compared with the oracle: the same model, eager, on one device, with the same request, seed and
schedule. What is meant to change a result (sparsity, a cache, quantization) stays in the oracle. Compared are the
outputs of components, the latents at each call of the denoiser, what the VAE is given to decode, and what the user
gets. Each figure has its bound beside it:

- fp32: the largest difference is at most 1e-4 of the oracle's largest value; of pixels, one level of 255.
- bf16: the distance from the oracle in fp32 is at most 1.5 times that of the eager oracle in bf16, for components that
  were given the same and for the latents over all calls; at most twice, for one call's latents and for what is decoded
  from them, which carry the errors of all earlier steps: they are chance of few numbers, in the oracle as well.
- The oracle itself, run again: no difference.

What ran is taken from a trace: torch's profiler is on while the denoiser and the decoder are called, and a row holds
the operators that computed attention and the calls of compiled code. A combination that fell back, ran dense
attention where it was asked for RainFusion, computed attention with another backend than the one that was named, or
whose denoiser called nothing that was compiled, is not validated; nor is one that asked for a compiled VAE decode
(`vae_policy: always`, `vae_scope: blocks`) and called none.

## Get the same again
Each row has its settings, request, seed, versions and the revision of its checkpoint, and is run again by:

```bash
vllm-omni-compile qualify --row docs/evidence/cpu-tiny.jsonl#klein-regional-dynamic
```

It prints which figures differ from the row's. The models of `cpu-tiny` have random weights, and a checkout of this
package makes them: `python -m tools.tiny_checkpoints.klein`, `.minimax_h3` and `.wan`. All its rows are made by:

```bash
vllm-omni-compile qualify --suite tiny --jobs 2 --evidence docs/evidence/cpu-tiny.jsonl
```

`--jobs` is how many combinations run at once, each in a process of its own; figures do not depend on it. Combinations
of your own are declared in a YAML file for `--suite`:

```yaml
models:
  klein:
    checkpoint: black-forest-labs/FLUX.2-klein-4B
    task: text-to-image
    request: {prompt: a lighthouse at dusk, seed: 1, width: 1024, height: 1024, num_inference_steps: 4}
combinations:
  - {id: klein-regional, model: klein}
  - {id: klein-full, model: klein, settings: {diffusion_compile_granularity: full}}
  - {id: klein-http, model: klein, api: http}
```

Settings are keyword arguments of `Omni`; `images: [cat.png]` in a request names pictures that go into it, whose hashes
are in the row; `refused: TEXT` declares what is to be rejected with an error that says this,
and `devices: 2` what needs two devices. Rows are written to `--evidence`, each as soon as it is done; raw latents and
pictures, whose hashes are in the rows, and the log of every process lie below `--out`. An interrupt ends every process,
and leaves the rows.

With `api: http` the combination is started as a user starts it, `vllm serve` with the settings as flags, and asked over
`/v1/images/generations`; the picture that came as PNG is compared with the oracle's, which is a program with `Omni` as
for every row, so that whatever the server does otherwise shows. Components and latents are watched in the server's
worker, through `--worker-extension-cls` and the route `/collective_rpc` of vLLM's development mode
(`VLLM_SERVER_DEV_MODE=1`); apart from these two it is the server that a user has. While it runs, whoever is on the
machine can call methods of its workers at its port of 127.0.0.1: run it where nobody else is. Such a row says nothing
of videos, whose encoding loses more than what is looked for, of the chat endpoint, or of several requests at once. Its
key has `http` and `PNG over HTTP`.

A server can demand evidence: with [`diffusion_compile_config.require_evidence`](options.md) it refuses to start what
has no validated row on its hardware.
"""

# What is to be known of all rows of a file, by its name.
_NOTES = {
    "h200": "Random weights in the real widths (`python -m tools.benchmarks.gpu.checkpoints klein_3_9b`, and "
    "`wan_1_3b`), and the suite `tools/benchmarks/gpu/h200.yaml`. The machine had no vLLM of its own: vLLM's Python "
    "code ran there with Triton stand-ins for its norm and activation kernels, the oracle as well. Full scope is "
    "explained in [scopes](scopes.md#how-near-to-eager).",
}
_HEADINGS = (
    "Row", "State", "Scope", "Shapes", "VAE", "Attention", "Other", "Dtype", "Request",
    "Nearest to its bound, or reason",
)  # fmt: skip
# Of a key: what is said only where it is not the usual.
_USUAL = {
    "execution_mode": "request",
    "capacity": 1,
    "cache_policy": "none",
    "quantization": "none",
    "offload": "none",
    "topology": "1 device",
    "compiler": "inductor",
    "bucket": None,
    "output_transport": "in process",
}
_SHOWN_REASON, _SHOWN_OPERATOR = 300, 70


def anchor(row: Row) -> str:
    """Return what a link to a row ends in: `evidence.md#ANCHOR`."""
    return f"row-{row.id}"


def render_evidence(files: Mapping[str, Sequence[Row]], generated: str) -> str:
    """Return `docs/evidence.md`.

    Args:
        files: Rows by the name of their file.
        generated: The comment that says where the page comes from.
    """
    lines = [generated + _INTRO]
    for name, rows in files.items():
        ordered = sorted(rows, key=_group)
        for (hardware, software), group in groupby(ordered, _group):
            lines += [f"## {name}: {hardware}", "", f"{software}.", ""]
            lines += [*textwrap.wrap(_NOTES[name], 120, break_on_hyphens=False), ""] if name in _NOTES else []
            lines += [f"| {' | '.join(_HEADINGS)} |", "|---" * len(_HEADINGS) + "|"]
            lines += [f"| {' | '.join(map(_cell, _cells(row)))} |" for row in group]
            lines.append("")
    return "\n".join(lines)


def files_of(folder: Path) -> dict[str, list[Row]]:
    """Read the rows of a folder by the stem of their file, and refuse two of the same id in all of them."""
    read_rows(folder)
    return {file.stem: read_rows(file) for file in sorted(folder.glob("*.jsonl"))}


def _group(row: Row) -> tuple[str, str]:
    made = row.provenance
    if made is None:
        return row.key.hardware, "Software not recorded"
    return (
        row.key.hardware,
        f"vLLM-Omni {made.vllm_omni}, torch {made.torch}, vllm-omni-diffusion-compile {made.version}",
    )


def _cells(row: Row) -> tuple[str, ...]:
    key = row.key
    other = [key.model]
    for name, usual in _USUAL.items():
        value = getattr(key, name)
        if value != usual and not (name == "compiler" and key.compile_scope == "eager"):
            other.append(f"{name.replace('_', ' ')}: {value}")
    shapes = {None: "", True: "dynamic", False: "static"}[key.dynamic]
    ran = ""
    if row.trace is not None:
        operators = row.trace.operators.items()
        ran = "; ran: " + ", ".join(f"`{_short(name)}` {count}" for name, count in operators)
    reason = row.reason or nearest(row)
    return (
        f'<a id="{anchor(row)}"></a>{row.id}', row.state, key.compile_scope, shapes, key.vae_policy,
        f"{key.attention_backend}{ran}", ", ".join(other), key.dtype, f"{key.task}, {key.shape}, {key.schedule}",
        textwrap.shorten(reason, _SHOWN_REASON, placeholder=" ..."),
    )  # fmt: skip


def _short(operator: str) -> str:
    """Cut the template arguments of a C++ kernel off."""
    return operator if len(operator) <= _SHOWN_OPERATOR else f"{operator[:_SHOWN_OPERATOR]}..."


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
