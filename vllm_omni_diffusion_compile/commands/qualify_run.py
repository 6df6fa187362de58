"""Running combinations for `vllm-omni-compile qualify`: each arm in a process of its own, then one row."""

from __future__ import annotations

import datetime as dt
import json
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_omni_diffusion_compile.commands.qualify_arm import API, ARM, ASSETS, MACHINE, RESULT
from vllm_omni_diffusion_compile.commands.qualify_process import Processes
from vllm_omni_diffusion_compile.errors import EvidenceError
from vllm_omni_diffusion_compile.evidence import (
    Row,
    digest,
    environment,
    file_digest,
    hardware,
    make_row,
    revision,
    versions,
)
from vllm_omni_diffusion_compile.evidence.checkpoint import pipeline_class
from vllm_omni_diffusion_compile.evidence.row import COMPILED_DECODE
from vllm_omni_diffusion_compile.evidence.suite import Declared

_ARRAYS = ("seen.npz", "artefact.npz")
_BUCKETS = "pad_seq_buckets"


@dataclass
class Run:
    """Combinations that are run on this machine, by one thread or by several.

    Args:
        out: Folder of the raw artefacts.
        timeout_s: What one arm may take.
        devices: How many there are.
        command: From a row's id to what runs the row again.
        processes: What runs the arms.
        started: Told the name of an arm whose process starts.
        ended: Told the same when that has ended.
        reuse_oracles: Whether to take an oracle that an earlier run left in `out`.
    """

    out: Path
    timeout_s: float
    devices: int
    command: Callable[[str], str]
    processes: Processes
    started: Callable[[str], None]
    ended: Callable[[str], None]
    reuse_oracles: bool = False
    _arms: dict[str, Future[dict[str, Any]]] = field(default_factory=dict)
    _hashes: dict[str, str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def row(self, declared: Declared) -> Row:
        """Run a combination; whatever becomes of it is said in its row."""
        reason = self._why_not(declared)
        if reason is not None:
            return self._row(declared, "not tested", reason=reason)
        subject = self._arm(declared.id, declared.checkpoint, declared.settings, declared)
        error = subject.get("error")
        if error is not None:
            said = _without_paths(f"{error['type']}: {error['message']}", self.out, declared.checkpoint)
            refused = declared.refused and declared.refused in said
            return self._row(declared, "rejected" if refused else "failed", reason=said, subject=subject)
        if declared.refused:
            return self._row(declared, "failed", reason="it is declared as refused, and it started", subject=subject)
        return self._compared(declared, subject)

    def _why_not(self, declared: Declared) -> str | None:
        if declared.devices > self.devices:
            return f"it needs {declared.devices} devices, and there is {self.devices}"
        folder = Path(declared.checkpoint)
        looks_like_one = folder.is_absolute() or declared.checkpoint.startswith(".")
        if looks_like_one and not folder.is_dir():
            how = f"; make it with: {declared.made_by}" if declared.made_by else ""
            return f"the checkpoint {_name(declared.checkpoint)} is not there{how}"
        missing = [file for file in declared.images if not Path(file).is_file()]
        if missing:
            return f"request.images: {', '.join(missing)} is not there"
        return None

    def _compared(self, declared: Declared, subject: dict[str, Any]) -> Row:
        from vllm_omni_diffusion_compile.evidence.compare import figures

        oracle = self._oracle(declared, in_fp32=False)
        arms = {"subject": subject, "oracle": oracle}
        same = declared.settings.get("enforce_eager") is True and subject["key"] == oracle.get("key")
        if not same and subject["key"]["dtype"] != "float32":
            arms["reference"] = self._oracle(declared, in_fp32=True)
        for name, arm in arms.items():
            if "error" in arm:
                said = f"the {name} did not run: {arm['error']['type']}: {arm['error']['message']}"
                return self._row(declared, "failed", reason=said, subject=subject)
        arrays = {name: _arrays(arm) for name, arm in arms.items()}
        try:
            found = figures(arrays["subject"], arrays["oracle"], arrays.get("reference"), same=same)
        except EvidenceError as error:
            return self._row(declared, "failed", reason=str(error), subject=subject, arms=arms)
        missed = [f"{item.name}: {item.value:g}, at most {item.bound:g}" for item in found if not item.holds]
        missed += _what_did_not_run(subject)
        parts: dict[str, Any] = {"subject": subject, "arms": arms, "figures": found}
        if missed:
            return self._row(declared, "failed", reason="; ".join(missed), **parts)
        try:
            return self._row(declared, "validated", **parts)
        except EvidenceError as error:  # nothing was seen of what has to be compared
            return self._row(declared, "failed", reason=str(error), **parts)

    def _oracle(self, declared: Declared, *, in_fp32: bool) -> dict[str, Any]:
        """Run the oracle, or take the one that an earlier combination had run."""
        known = {
            "checkpoint": declared.checkpoint, "settings": declared.oracle, "request": declared.request,
            **self._with_assets(declared),
        }  # fmt: skip
        name = f"oracle-{'fp32-' if in_fp32 else ''}{digest(known)[:12]}"
        return self._arm(name, declared.checkpoint, declared.oracle, declared, in_fp32=in_fp32)

    def _with_assets(self, declared: Declared) -> dict[str, dict[str, str]]:
        """Return the hashes of the pictures of a request, as they were when this run first looked; empty without."""
        with self._lock:
            for file in declared.images:
                if file not in self._hashes and Path(file).is_file():
                    self._hashes[file] = file_digest(Path(file))
            known = {file: self._hashes[file] for file in declared.images if file in self._hashes}
        return {ASSETS: known} if known else {}

    def _arm(
        self, name: str, checkpoint: str, settings: Mapping[str, Any], declared: Declared, *, in_fp32: bool = False
    ) -> dict[str, Any]:
        with self._lock:
            known = self._arms.get(name)
            arm = self._arms.setdefault(name, Future())
        if known is None:  # nobody has begun it: it is ours, and whoever else needs it waits
            described = {
                "checkpoint": checkpoint, "settings": settings, "request": declared.request, "in_fp32": in_fp32,
                **self._with_assets(declared),
                API: declared.api if name == declared.id else "offline",
                MACHINE: {"hardware": hardware(), "environment": environment()},
            }  # fmt: skip
            try:
                arm.set_result(self._ran(name, described, reuse=self.reuse_oracles and name != declared.id))
            except BaseException as error:
                arm.set_exception(error)
                raise
        return arm.result()

    def _ran(self, name: str, arm: Mapping[str, Any], *, reuse: bool) -> dict[str, Any]:
        folder = self.out / name
        folder.mkdir(parents=True, exist_ok=True)
        known = _left(folder, arm, _revision(arm["checkpoint"])) if reuse else None
        if known is None:
            (folder / ARM).write_text(json.dumps(arm, indent=1), encoding="utf-8")
            self.started(name)
            try:
                known = self.processes.run(folder, self.timeout_s)
            finally:
                self.ended(name)
        return known | {"folder": folder}

    def _row(  # noqa: PLR0913 - the parts of a row
        self,
        declared: Declared,
        state: Any,
        *,
        reason: str | None = None,
        subject: Mapping[str, Any] | None = None,
        arms: Mapping[str, Mapping[str, Any]] | None = None,
        figures: Any = (),
    ) -> Row:
        key = _key(declared, subject or {})
        trace = (subject or {}).get("trace")
        return make_row(
            declared.id,
            key,
            state,
            reason=None if reason is None else _without_paths(reason, self.out, declared.checkpoint),
            figures=figures,
            trace=trace,
            provenance={
                "checkpoint": _name(declared.checkpoint),
                "checkpoint_revision": (subject or {}).get("revision") or _revision(declared.checkpoint),
                **versions(),
                "command": self.command(declared.id),
                "settings": declared.settings,
                "oracle": declared.oracle,
                "request": declared.request,
                "assets": self._with_assets(declared).get(ASSETS, {}),
                "seed": declared.request["seed"],
                "artefacts": _digests(self.out, (arms or {}).values()),
                "environment": (subject or {}).get("environment") or environment(),
                "measured_on": dt.datetime.now(dt.timezone.utc).date().isoformat(),
            },
        )


def device_count() -> int:
    """How many devices there are."""
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 1


def _left(folder: Path, arm: Mapping[str, Any], checkpoint_revision: str) -> dict[str, Any] | None:
    """Return what an earlier run left of an arm, if it was the same one on such a machine, with the same software."""
    try:
        before = json.loads((folder / ARM).read_text(encoding="utf-8"))
        result: dict[str, Any] = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    same = "error" not in result and result["versions"] == versions() and result["revision"] == checkpoint_revision
    return result if same and before == json.loads(json.dumps(arm)) else None


def _arrays(arm: Mapping[str, Any]) -> dict[str, Any]:
    import numpy as np

    arrays: dict[str, Any] = {}
    for name in _ARRAYS:
        with np.load(arm["folder"] / name) as file:
            arrays |= {key: file[key] for key in file.files}
    return arrays


def _digests(out: Path, arms: Any) -> dict[str, str]:
    files = [arm["folder"] / name for arm in arms for name in _ARRAYS]
    return {file.relative_to(out).as_posix(): file_digest(file) for file in files if file.exists()}


def _what_did_not_run(subject: Mapping[str, Any]) -> list[str]:
    """Say what was asked for and was not seen to run."""
    key, trace = subject["key"], subject["trace"]
    missed = []
    if trace["fallbacks"]:
        missed.append(f"{trace['fallbacks']} fallback(s): what they answered was eager")
    if key["compile_scope"] != "eager" and not trace["compiled_calls"]:
        missed.append("no compiled code was called")
    if key["vae_policy"] in COMPILED_DECODE and not trace["decode_compiled_calls"]:
        missed.append(f"vae_policy is {key['vae_policy']!r}, and no compiled decode was called")
    sparse = any("RAINFUSION" in operator for operator in trace["operators"])
    if "RAINFUSION_ATTN" in key["attention_backend"] and not sparse:
        missed.append("no sparse attention ran")
    return [*missed, *subject["not_as_asked"]]


def _key(declared: Declared, subject: Mapping[str, Any]) -> dict[str, Any]:
    """The key of a row: what the worker said; of what never started, what was declared."""
    settings, request = declared.settings, declared.request
    known = dict(subject.get("key") or _as_declared(declared))
    scheduler = known.pop("scheduler", "not known")
    config = settings.get("diffusion_compile_config")
    packed = subject.get("packed")
    bucketed = isinstance(config, Mapping) and config.get(_BUCKETS) is not None
    size = f"{request.get('width', '?')}x{request.get('height', '?')}"
    frames = request.get("num_frames", 1)
    shape = size if frames == 1 else f"{size}, {frames} frames"
    return {
        **known,
        "task": declared.task,
        "api_mode": declared.api,
        "shape": ", ".join([shape, *map(_size_of, declared.images)]),
        "schedule": f"{scheduler}, {request.get('num_inference_steps', 'default')} steps",
        "packed_layout": "none" if packed is None else f"{packed} rows",
        "output_representation": known.get("output_representation", "not known"),
        "output_transport": "PNG over HTTP" if declared.api == "http" else "in process",
        "bucket": packed if bucketed else None,
    }


def _as_declared(declared: Declared) -> dict[str, Any]:
    """What settings say of a combination that never started."""
    settings = declared.settings
    config = settings.get("diffusion_compile_config")
    config = config if isinstance(config, Mapping) else {}
    eager = settings.get("enforce_eager") is True
    attention = settings.get("diffusion_attention_config")
    mode = str(config.get("mode", ""))
    return {
        "model": pipeline_class(Path(declared.checkpoint)) or "not known",
        "execution_mode": "step" if settings.get("step_execution") else "request",
        "capacity": settings.get("max_num_seqs", 1),
        "attention_backend": "the platform's" if attention is None else json.dumps(attention, sort_keys=True),
        "cache_policy": str(settings.get("cache_backend") or "none"),
        "quantization": json.dumps(settings["quantization_config"]) if "quantization_config" in settings else "none",
        "offload": ", ".join(name for name in settings if name.startswith("enable_") and "offload" in name) or "none",
        "topology": _declared_topology(declared),
        "hardware": hardware(),
        "dtype": str(settings.get("dtype", "bfloat16")),
        "compiler": "none" if eager else " ".join(filter(None, (str(config.get("backend", "inductor")), mode))),
        "compile_scope": "eager" if eager else settings.get("diffusion_compile_granularity", "regional"),
        "dynamic": None if eager else settings.get("diffusion_compile_dynamic", True),
        "vae_policy": "off"
        if eager or settings.get("diffusion_compile_vae") is False
        else config.get("vae_policy", "measure"),
    }


def _declared_topology(declared: Declared) -> str:
    degrees = [f"{name} {value}" for name, value in declared.settings.items() if name.endswith(("_degree", "_size"))]
    devices = f"{declared.devices} device" + "s" * (declared.devices > 1)
    return f"{devices}: {', '.join(degrees)}" if degrees else devices


def _revision(checkpoint: str) -> str:
    return revision(Path(checkpoint)) if Path(checkpoint).is_dir() else "not known"


def _size_of(picture: str) -> str:
    from PIL import Image

    try:
        with Image.open(picture) as opened:
            return f"picture of {opened.width}x{opened.height}"
    except OSError:  # which ends the run of who reads it
        return "picture"


def _name(checkpoint: str) -> str:
    """Name a checkpoint as it was declared; of a folder somewhere on this machine, by its last part only."""
    return Path(checkpoint).name if Path(checkpoint).is_absolute() else checkpoint


def _without_paths(reason: str, out: Path, checkpoint: str) -> str:
    """Keep places of this machine out of a row."""
    places = {str(out.resolve()): "OUT", str(out): "OUT", str(Path.cwd()): ".", sys.prefix: "ENVIRONMENT"}
    if Path(checkpoint).is_absolute():
        places[checkpoint] = _name(checkpoint)
    # The innermost first: one may lie in another.
    for place in sorted(places, key=len, reverse=True):
        reason = reason.replace(place, places[place]) if Path(place).is_absolute() else reason
    return reason.replace(str(Path.home()), "~")
