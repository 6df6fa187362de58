"""Inductor in a worker: its cache and its workers are there before the weights; what is new is kept at ready."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from vllm_omni_diffusion_compile.settings import CONFIG, DiffusionCompileConfig, DiffusionCompileSettings
from vllm_omni_diffusion_compile.upstream.log import host_logger

if TYPE_CHECKING:
    from vllm_omni_diffusion_compile.compile.cache.bundle import Manifest
    from vllm_omni_diffusion_compile.compile.cache.key import CacheKey
    from vllm_omni_diffusion_compile.compile.cache.working import Working

logger = host_logger(__name__)

_RUNNER = "vllm_omni.diffusion.worker.diffusion_model_runner"
# Settings that change what is compiled.
_SETTINGS = ("diffusion_compile_granularity", "diffusion_compile_dynamic", "diffusion_compile_vae")
_CONFIG_KEYS = ("backend", "mode")
# The degrees of `parallel_config`: each splits what a rank computes.
_PARALLEL = (
    *("tensor_parallel_size", "sequence_parallel_size", "ulysses_degree", "ring_degree", "cfg_parallel_size"),
    *("pipeline_parallel_size", "data_parallel_size", "vae_patch_parallel_size", "use_hsdp"),
)

# Of objects within objects in a model's configuration; deeper ones count by their class.
_DEEPEST = 8

# One a process: torch has one cache directory.
_working: Working | None = None


def prepare_inductor(load_model: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(load_model)
    def with_inductor(self: Any, *args: Any, **kwargs: Any) -> None:
        from vllm_omni_diffusion_compile.compile.workers import start_workers

        inductor = sys.modules[_RUNNER].current_omni_platform.supports_torch_inductor()
        if inductor and not getattr(self.od_config, "enforce_eager", True):
            config = DiffusionCompileSettings.of(self.od_config).diffusion_compile_config
            if config.needs_inductor:
                _open(self.od_config, config)
                # After that: they inherit where the cache is.
                if reason := start_workers():
                    logger.debug("No compile workers are started ahead: %s.", reason)
        load_model(self, *args, **kwargs)

    return with_inductor


def _open(od_config: Any, config: DiffusionCompileConfig) -> None:
    global _working
    if _working is not None or config.cache_dir is False:
        return
    from vllm_omni_diffusion_compile.compile.cache.place import cache_directory
    from vllm_omni_diffusion_compile.compile.cache.store import Store
    from vllm_omni_diffusion_compile.compile.cache.working import Working
    from vllm_omni_diffusion_compile.compile.events import LOG

    directory, why = cache_directory(config.cache_dir)
    if directory is None:
        logger.info("Compile cache: %s.", why)
        return
    store = Store(directory)
    try:
        _working = Working(store, _key(od_config), _warn)
    except OSError as error:  # no place to compile into: torch finds one, or says so
        _warn(f"{error}. It is not used, and this start compiles everything.")
        return
    _working.use()
    LOG.listeners.append(_keep_soon)
    LOG.ready_listeners.append(_keep)
    if _working.restored is not None:
        logger.info("Compile cache: %s from %s.", _counted(_working.restored), store.path(_working.key.digest))
    else:
        logger.info("Compile cache: nothing to begin with in %s.", store.path(_working.key.digest))


def _keep() -> None:
    # The worker answers that the server is ready between two requests: nothing is being compiled.
    if _working is not None and (kept := _working.keep(settled=True)):
        logger.info("Compile cache: %s kept for the next start.", _counted(kept))


def _keep_soon(event: Any) -> None:
    if event.after_ready and _working is not None:
        _working.keep_soon()


def _warn(what: str) -> None:
    logger.warning("Compile cache (%s.cache_dir): %s", CONFIG, what)


def _counted(manifest: Manifest) -> str:
    return f"{len(manifest.files)} artifact(s)"


def _key(od_config: Any) -> CacheKey:
    """Everything that could make an artifact wrong, and what tells a reader which model it is of."""
    import vllm
    import vllm_omni

    from vllm_omni_diffusion_compile import __version__
    from vllm_omni_diffusion_compile.compile.cache.key import CacheKey, machine_facts

    settings = DiffusionCompileSettings.of(od_config)
    parallel = getattr(od_config, "parallel_config", None)
    degrees = {name: getattr(parallel, name, None) for name in _PARALLEL}
    compiled = {name: getattr(settings, name) for name in _SETTINGS} | {
        name: getattr(settings.diffusion_compile_config, name) for name in _CONFIG_KEYS
    }
    return CacheKey({
        **machine_facts(),
        "vllm": str(vllm.__version__),
        "vllm-omni": str(vllm_omni.__version__),
        "vllm-omni-diffusion-compile": __version__,
        "model": str(getattr(od_config, "model_class_name", None)),
        "model configuration": _digest(_model_configuration(od_config)),
        "dtype": str(getattr(od_config, "dtype", None)),
        "parallel": _shown({name: degree for name, degree in degrees.items() if degree not in (None, 1, False)}),
        "settings": _shown(compiled),
    })  # fmt: skip


def _model_configuration(od_config: Any) -> Mapping[str, Any]:
    """What the model is built from, and not where it lies: replicas may have it elsewhere."""
    transformer = getattr(od_config, "tf_model_config", None)
    return {
        "transformer": getattr(transformer, "params", None),
        "index": getattr(od_config, "model_config", None) or {},
        "quantization": getattr(od_config, "quantization_config", None),
        "attention": getattr(od_config, "diffusion_attention_config", None),
        "cache": getattr(od_config, "cache_backend", None),
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(_plainly(value), sort_keys=True).encode()).hexdigest()[:16]


def _plainly(value: Any, depth: int = 0) -> Any:
    """A configuration as JSON knows it, by what its objects hold, without the addresses that a repr has."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        found: Mapping[Any, Any] = value
    elif isinstance(value, (list, tuple)):
        return [_plainly(item, depth + 1) for item in value]
    elif isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif hasattr(value, "__dict__") and not isinstance(value, (type, enum.Enum)) and not callable(value):
        # A method's name belongs to what it is told: two of them may have the same settings.
        public = {name: item for name, item in vars(value).items() if not name.startswith("_")}
        found = {"": type(value).__qualname__, **public}
    else:
        text = str(value)
        return type(value).__qualname__ if " at 0x" in text else text
    if depth > _DEEPEST:
        return type(value).__qualname__
    return {str(name): _plainly(item, depth + 1) for name, item in found.items()}


def _shown(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items()) or "none"
