"""One arm of a comparison: a model, started as a program with `Omni` starts it, and one request."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_omni_diffusion_compile.upstream.combination import checkpoint_folder
from vllm_omni_diffusion_compile.upstream.observe import EXTENSION

RPC_TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Arm:
    """What is run.

    Args:
        checkpoint: Folder or name of the checkpoint.
        settings: Keyword arguments of `Omni`.
        request: `prompt`, `negative_prompt`, `images` (files), and fields of `OmniDiffusionSamplingParams`.
        in_fp32: Compute everything in fp32.
    """

    checkpoint: str
    settings: Mapping[str, Any]
    request: Mapping[str, Any]
    in_fp32: bool = False


def run_arm(arm: Arm, folder: Path) -> dict[str, Any]:
    """Start the model, have the request answered twice, and stop it; the second time it is watched.

    What is compiled is compiled by then, so that what ran is what a user's request runs.

    Args:
        arm: What is run.
        folder: Where `seen.npz` and `artefact.npz` are written.

    Returns:
        As `result` makes it.
    """
    from vllm_omni.entrypoints.omni import Omni

    started = time.perf_counter()
    omni = Omni(model=arm.checkpoint, worker_extension_cls=EXTENSION, **arm.settings)
    try:
        ready = time.perf_counter()
        omni.generate(_prompt(arm), _sampling(arm.request), use_tqdm=False)
        key = _ask(omni, "diffusion_compile_observe", arm.in_fp32)
        asked = time.perf_counter()
        outputs = omni.generate(_prompt(arm), _sampling(arm.request), use_tqdm=False)
        answered = time.perf_counter()
        facts = _ask(omni, "diffusion_compile_observed", str(folder / "seen.npz"))
    finally:
        omni.close()
    key["output_representation"] = write_artefact(_artefacts(outputs), folder / "artefact.npz")
    return result(arm, key, facts, ready_s=ready - started, request_s=answered - asked)


def result(
    arm: Arm, key: dict[str, Any], facts: Mapping[str, Any], *, ready_s: float, request_s: float
) -> dict[str, Any]:
    """Put together what is known of an arm that has run.

    Args:
        arm: What ran.
        key: Fields of a row's key.
        facts: What `Observer` says in the end.
        ready_s: What the start took.
        request_s: What the watched request took.

    Returns:
        `key`; `trace`: fields of a row's trace; `packed` and `not_as_asked`, as `Observer` says them; `revision` of the
        checkpoint; `environment`; `versions`; `ready_s` and `request_s`.
    """
    from vllm_omni_diffusion_compile.evidence import environment, revision, versions

    # After the start, which may have fetched them.
    files = checkpoint_folder(arm.checkpoint, arm.settings.get("revision"))
    beside = ("packed", "not_as_asked")
    return {
        "key": key,
        "trace": {name: value for name, value in facts.items() if name not in beside},
        **{name: facts[name] for name in beside},
        "revision": "unknown" if files is None else revision(files),
        "environment": environment(),
        "versions": versions(),
        "ready_s": ready_s,
        "request_s": request_s,
    }


def _prompt(arm: Arm) -> dict[str, Any]:
    words = {name: arm.request[name] for name in ("prompt", "negative_prompt") if name in arm.request}
    pictures = [_picture(file, arm.checkpoint) for file in arm.request.get("images", ())]
    if pictures:
        words["multi_modal_data"] = {"image": pictures[0] if len(pictures) == 1 else pictures}
    return words


def _picture(file: str, checkpoint: str) -> Any:
    """Read a picture, in the colours that the server would hand to the model."""
    from PIL import Image
    from vllm_omni.diffusion.io_support import image_color_format

    from vllm_omni_diffusion_compile.evidence.checkpoint import pipeline_class

    folder = checkpoint_folder(checkpoint)
    colors = image_color_format("" if folder is None else pipeline_class(folder))
    with Image.open(file) as picture:
        return picture.convert(colors)


def _sampling(request: Mapping[str, Any]) -> Any:
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

    return OmniDiffusionSamplingParams(
        **{name: value for name, value in request.items() if name not in ("prompt", "negative_prompt", "images")}
    )


def _ask(omni: Any, method: str, *args: Any) -> dict[str, Any]:
    return first_answer(omni.engine.collective_rpc(method=method, args=args, timeout=RPC_TIMEOUT_S), method)


def first_answer(answers: Any, method: str) -> dict[str, Any]:
    """Return the answer of the first worker, of whichever stage, that has a method."""
    for answer in _flat(answers):
        if isinstance(answer, dict) and not answer.get("todo"):
            return answer
    raise RuntimeError(f"no worker answered {method}: {answers}")


def _flat(answers: Any) -> Iterator[Any]:
    if isinstance(answers, (list, tuple)):
        for answer in answers:
            yield from _flat(answer)
    else:
        yield answers


def write_artefact(found: Iterable[Any], file: Path) -> str:
    """Write what the user got, as arrays, and say what it is."""
    import numpy as np

    arrays: dict[str, Any] = {f"artefact {number}": array for number, array in enumerate(found, 1)}
    if not arrays:
        raise RuntimeError("the request was answered, and neither picture, video nor sound came back")
    np.savez(file, **arrays)
    return ", ".join(dict.fromkeys(f"{array.ndim}-dimensional {array.dtype}" for array in arrays.values()))


def _artefacts(outputs: Any) -> Iterator[Any]:
    for output in outputs:
        if output.error:
            raise RuntimeError(output.error)
        yield from _arrays(output.images)
        yield from _arrays(output.multimodal_output)


def _arrays(found: Any) -> Iterator[Any]:
    import numpy as np
    import torch
    from PIL import Image

    if isinstance(found, torch.Tensor):
        yield (found.float() if found.is_floating_point() else found).cpu().numpy()
    elif isinstance(found, (np.ndarray, Image.Image)):
        yield np.asarray(found)
    elif isinstance(found, Mapping):
        for value in found.values():
            yield from _arrays(value)
    elif isinstance(found, (list, tuple)):
        for value in found:
            yield from _arrays(value)
