"""No start without evidence, where `require_evidence` asks for it."""

from __future__ import annotations

import functools
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_omni_diffusion_compile.errors import EvidenceError
from vllm_omni_diffusion_compile.settings import CONFIG, NAMES, DiffusionCompileSettings
from vllm_omni_diffusion_compile.upstream.combination import checkpoint_folder, known_at_start, remember_quantization
from vllm_omni_diffusion_compile.upstream.log import host_logger

logger = host_logger(__name__)

_OPTION = f"{CONFIG}.require_evidence"
# Simple fields of the host's configuration that make another combination, with what they are if nobody sets them.
_HOST: dict[str, Any] = {
    "enforce_eager": False,
    "cache_backend": "none",
    "enable_cpu_offload": False,
    "enable_layerwise_offload": False,
    "enable_distributed_layerwise_offload": False,
    "step_execution": False,
    "max_num_seqs": 1,
    "trust_remote_code": False,
}


def refuse_without_evidence(load_model: Callable[..., None]) -> Callable[..., None]:
    """Look for a validated row before weights are loaded; the worker knows the hardware, and nobody before it does."""

    @functools.wraps(load_model)
    def with_evidence(self: Any, *args: Any, **kwargs: Any) -> None:
        config = DiffusionCompileSettings.of(self.od_config).diffusion_compile_config
        if config.require_evidence is not None:
            _look(self.od_config, config)
        # Asked for later by whoever watches this worker; nobody else needs it.
        if getattr(self.od_config, "worker_extension_cls", None):
            remember_quantization(self.od_config)
        load_model(self, *args, **kwargs)

    return with_evidence


def _look(od_config: Any, config: Any) -> None:
    from vllm_omni_diffusion_compile.evidence import revision, versions
    from vllm_omni_diffusion_compile.evidence.required import OF_SETTINGS, require

    files = checkpoint_folder(str(od_config.model), getattr(od_config, "revision", None))
    software = versions() | {"checkpoint_revision": "not known" if files is None else revision(files)}
    buckets: list[int | None] = [None] if config.pad_seq_buckets is None else [*config.pad_seq_buckets.rows]
    path = Path(config.require_evidence).expanduser()
    try:
        rows = require(
            path, known_at_start(od_config), software, buckets, _command(od_config, path),
            {name: getattr(config, name) for name in OF_SETTINGS},
        )  # fmt: skip
    except EvidenceError as error:
        raise EvidenceError(f"{_OPTION}: {error}") from None
    logger.info("%s: validated by %s.", _OPTION, ", ".join(f"{path}#{row.id}" for row in rows))


def _command(od_config: Any, path: Path) -> str:
    """The command that qualifies this combination; the request is what the user serves."""
    settings = {
        name: value
        for name, default in _HOST.items()
        if (value := getattr(od_config, name, default)) not in (default, None)
    }
    given = {name: getattr(od_config, name, None) for name in NAMES}
    config = {name: value for name, value in (given.pop(CONFIG) or {}).items() if name != "require_evidence"}
    settings |= {name: value for name, value in given.items() if value is not None}
    settings |= {"dtype": str(od_config.dtype).removeprefix("torch."), **({CONFIG: config} if config else {})}
    request = {"prompt": "PROMPT", "seed": 1, "width": 1024, "height": 1024, "num_inference_steps": 4}
    return (
        f"vllm-omni-compile qualify --model {shlex.quote(str(od_config.model))} --id NAME "
        f"--settings {shlex.quote(json.dumps(settings))} --request {shlex.quote(json.dumps(request))} "
        f"--evidence {shlex.quote(str(path / 'rows.jsonl' if path.is_dir() else path))}"
    )
