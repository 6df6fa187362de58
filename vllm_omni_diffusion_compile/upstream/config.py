"""`diffusion_compile_vae` on vLLM-Omni's configuration classes, and what they should refuse."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import yaml

from vllm_omni_diffusion_compile.errors import SettingError
from vllm_omni_diffusion_compile.settings import NAMES, VAE, refuse_near_misses
from vllm_omni_diffusion_compile.upstream.log import host_logger

logger = host_logger(__name__)

# What a deploy YAML may say of a generic single-stage model, where 0.30.0 reads none of it.
_FROM_YAML = (*NAMES, "enforce_eager")

# The generic stage's deploy YAML and overrides, handed from where they are known to where the stage is built.
_generic_stage: ContextVar[tuple[str | None, Mapping[str, Any]]] = ContextVar("_generic_stage", default=(None, {}))


def with_name(constant: Any) -> Any:
    """A constant that vLLM-Omni computed at import from the field names of a class, with our field's name in it."""
    if isinstance(constant, tuple):
        return (*constant, VAE)
    return constant | {VAE}


def with_deploy_field(constant: dict[str, Any]) -> dict[str, Any]:
    from vllm_omni.config.stage_config import StageDeployConfig

    return constant | {VAE: StageDeployConfig.__dataclass_fields__[VAE]}


def for_diffusion_stages(constant: dict[Any, Any]) -> dict[Any, Any]:
    from vllm_omni.config.stage_config import StageExecutionType

    diffusion = StageExecutionType.DIFFUSION
    return constant | {diffusion: constant[diffusion] | {VAE}}


def check_type(post_init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(post_init)
    def __post_init__(self: Any) -> None:
        value = getattr(self, VAE, True)
        if not isinstance(value, bool):
            raise TypeError(f"{VAE} must be a bool, got {type(value)!r}")
        post_init(self)

    return __post_init__


def refuse_full_with_distributed_offload(post_init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(post_init)
    def __post_init__(self: Any) -> None:
        full = getattr(self, "diffusion_compile_granularity", None) == "full"
        if full and getattr(self, "enable_distributed_layerwise_offload", False):
            raise ValueError(
                "diffusion_compile_granularity='full' is incompatible with distributed layerwise offload; "
                "use 'regional' compilation instead"
            )
        post_init(self)

    return __post_init__


def check_names(normalize: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(normalize)
    def normalize_omni_diffusion_kwargs(raw_kwargs: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        refuse_near_misses(raw_kwargs, _host_fields())
        return normalize(raw_kwargs, **options)

    return normalize_omni_diffusion_kwargs


def check_keywords(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        refuse_near_misses(kwargs, _host_fields())
        init(self, *args, **kwargs)

    return __init__


def remember_generic_stage(resolve: Callable[..., Any]) -> Callable[..., Any]:
    """0.28.0: the default stage is built from keyword arguments that no longer hold the YAML or the overrides."""

    @functools.wraps(resolve)
    def _resolve_stage_configs(self: Any, model: str, kwargs: dict[str, Any], **options: Any) -> Any:
        from vllm_omni.entrypoints.utils import parse_stage_overrides

        overrides = parse_stage_overrides(kwargs.get("stage_overrides")) or {}
        token = _generic_stage.set((kwargs.get("deploy_config"), overrides.get("0") or {}))
        try:
            return resolve(self, model, kwargs, **options)
        finally:
            _generic_stage.reset(token)

    return _resolve_stage_configs


def complete_default_stage(create: Callable[..., Any]) -> Callable[..., Any]:
    """0.28.0: builds the default stage from an explicit dict, in which unknown keys vanish."""

    @functools.wraps(create)
    def _create_default_diffusion_stage_cfg(kwargs: dict[str, Any]) -> Any:
        deploy_config, overrides = _generic_stage.get()
        refuse_near_misses([*kwargs, *overrides], _host_fields())
        kwargs = (
            kwargs | _deploy_settings(deploy_config, kwargs) | {n: overrides[n] for n in _FROM_YAML if n in overrides}
        )
        stages = create(kwargs)
        value = kwargs.get(VAE)
        for stage in stages:
            stage["engine_args"][VAE] = True if value is None else value
        return stages

    return _create_default_diffusion_stage_cfg


def remember_ignored_yaml(create: Callable[..., Any]) -> Callable[..., Any]:
    """0.30.0: finds no registered pipeline for a generic model and forgets the YAML that came with it."""

    @functools.wraps(create)
    def create_from_model(cls: Any, model: str, **options: Any) -> Any:
        config = create(cls, model, **options)
        _generic_stage.set((options.get("deploy_config_path") if config is None else None, {}))
        return config

    return create_from_model


def apply_ignored_yaml(create: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create)
    def create_typed_default_diffusion(cls: Any, model: str, kwargs: dict[str, Any]) -> Any:
        deploy_config, _ = _generic_stage.get()
        _generic_stage.set((None, {}))
        return create(cls, model, kwargs | _deploy_settings(deploy_config, kwargs))

    return create_typed_default_diffusion


def _deploy_settings(path: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """What the first stage of a deploy YAML says of our settings, where `given` (flags, keywords) says nothing.

    Everything else in the file is named, since vLLM-Omni reads none of it.

    Raises:
        SettingError: One of our settings is misspelt, or stands outside of a stage.
    """
    if path is None:
        return {}
    from vllm_omni.config.config_factory import StageConfigFactory

    deploy = StageConfigFactory._load_user_deploy_config(
        path
    )  # finds it as the release does, and merges what it extends
    stage = next((stage for stage in deploy.stages if stage.stage_id == 0), None)
    _name_ignored(path)
    if stage is None:
        return {}
    refuse_near_misses(stage.engine_extras, _host_fields())
    said = {name: getattr(stage, name, None) for name in _FROM_YAML}
    return {name: value for name, value in said.items() if value is not None and given.get(name) is None}


def _name_ignored(path: str) -> None:
    file = Path(path)
    if not file.is_file():
        return  # one of vLLM-Omni's own, found by its name
    content = yaml.safe_load(file.read_text())
    top = content if isinstance(content, dict) else {}
    refuse_near_misses(top)
    misplaced = sorted(set(top) & set(NAMES))
    if misplaced:
        raise SettingError(f"{path}: {', '.join(misplaced)} stands outside of a stage; put it below `stages:`")
    ignored = sorted(set(top) - {"stages"})
    for stage in top.get("stages") or ():
        number = stage.get("stage_id")
        keys = set(stage) | set(stage.get("engine_args") or ())
        read = {*_FROM_YAML, "stage_id", "engine_args"} if number == 0 else set()
        ignored += [f"stages[{number}].{key}" for key in sorted(keys - read)]
    if ignored:
        logger.warning(
            "%s: vLLM-Omni reads no deploy YAML for a generic single-stage model, so these keys have no effect: %s. "
            "Give them on the command line. Taken from stage 0: %s.",
            path, ", ".join(ignored), ", ".join(_FROM_YAML),
        )  # fmt: skip


def _host_fields() -> frozenset[str]:
    from vllm_omni.diffusion.data import OmniDiffusionConfig

    return frozenset(OmniDiffusionConfig.__dataclass_fields__)
