"""Our own settings on vLLM-Omni's configuration classes, and what they should refuse."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import yaml

from vllm_omni_diffusion_compile.errors import SettingError
from vllm_omni_diffusion_compile.settings import (
    CONFIG,
    NAMES,
    OWN,
    DiffusionCompileSettings,
    merged,
    plain_config,
    refuse_near_misses,
)
from vllm_omni_diffusion_compile.upstream.adapters import refuse_adapters
from vllm_omni_diffusion_compile.upstream.log import host_logger

logger = host_logger(__name__)

# What a deploy YAML may say of a generic single-stage model, where 0.30.0 reads none of it.
_FROM_YAML = (*NAMES, "enforce_eager")

# The generic stage's deploy YAML and overrides, handed from where they are known to where the stage is built.
_generic_stage: ContextVar[tuple[str | None, Mapping[str, Any]]] = ContextVar("_generic_stage", default=(None, {}))


def with_names(constant: Any) -> Any:
    """A constant that vLLM-Omni computed at import from the field names of a class, with ours in it."""
    if isinstance(constant, tuple):
        return (*constant, *(name for name in OWN if name not in constant))
    return constant | set(OWN)


def with_deploy_fields(constant: dict[str, Any]) -> dict[str, Any]:
    from vllm_omni.config.stage_config import StageDeployConfig

    return constant | {name: StageDeployConfig.__dataclass_fields__[name] for name in OWN}


def for_diffusion_stages(constant: dict[Any, Any]) -> dict[Any, Any]:
    from vllm_omni.config.stage_config import StageExecutionType

    diffusion = StageExecutionType.DIFFUSION
    return constant | {diffusion: constant[diffusion] | set(OWN)}


def projected_config(value: Any) -> dict[str, Any] | None:
    """What the projection, a pydantic dataclass, makes of the mapping; its ValidationError holds our message."""
    return plain_config(value)


def check_values(post_init: Callable[..., None], *, ours: Callable[[str], bool]) -> Callable[..., None]:
    """Have `OmniDiffusionConfig` refuse what our fields cannot hold; `ours` says whether a field is ours."""

    @functools.wraps(post_init)
    def __post_init__(self: Any) -> None:
        for name in filter(ours, OWN):
            setattr(self, name, _checked(name, getattr(self, name)))
        post_init(self)

    return __post_init__


def _checked(name: str, value: Any) -> Any:
    """Return a value of one of our fields as it travels to the workers.

    Raises:
        SettingError, TypeError: The field cannot hold it.
    """
    if name == CONFIG:
        return plain_config(value)
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {type(value)!r}")
    return value


def name_deploy_errors(load: Callable[..., Any]) -> Callable[..., Any]:
    """Check our settings of every stage where a deploy YAML is read, while its path is known."""

    @functools.wraps(load)
    def load_deploy_config(path: str | Path) -> Any:
        deploy = load(path)
        for stage in deploy.stages:
            try:
                DiffusionCompileSettings.of(stage)
            except SettingError as error:
                raise SettingError(f"{path}: stage {stage.stage_id}: {error}") from None
        return deploy

    return load_deploy_config


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


def refuse_missing_adapters(post_init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(post_init)
    def __post_init__(self: Any) -> None:
        refuse_adapters(self)
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
    """0.28.0: the default stage is built from keyword arguments that no longer hold the YAML or the overrides.

    The mapping of a registered pipeline would be looked at in the worker only; it is checked here too.
    """

    @functools.wraps(resolve)
    def load_and_resolve_stage_configs(model: str, kwargs: dict[str, Any] | None, **options: Any) -> Any:
        overrides = options.get("stage_overrides") or {}
        plain_config((kwargs or {}).get(CONFIG))
        for stage, values in overrides.items():
            plain_config(values.get(CONFIG), f"stage_overrides[{stage!r}].{CONFIG}")
        token = _generic_stage.set((options.get("deploy_config_path"), overrides.get("0") or {}))
        try:
            return resolve(model, kwargs, **options)
        finally:
            _generic_stage.reset(token)

    return load_and_resolve_stage_configs


def complete_default_stage(create: Callable[..., Any]) -> Callable[..., Any]:
    """0.28.0: builds the default stage from an explicit dict, in which unknown keys vanish."""

    @functools.wraps(create)
    def _create_default_diffusion_stage_cfg(kwargs: dict[str, Any]) -> Any:
        deploy_config, overrides = _generic_stage.get()
        refuse_near_misses([*kwargs, *overrides], _host_fields())
        given = {name: value for name, value in kwargs.items() if value is not None}
        # A mapping as a whole, as this release does for a registered pipeline.
        kwargs = (
            kwargs | _deploy_settings(deploy_config) | given | {n: overrides[n] for n in _FROM_YAML if n in overrides}
        )
        said = {name: _default(name) if kwargs.get(name) is None else kwargs[name] for name in OWN}
        ours = {name: _checked(name, value) for name, value in said.items()}
        stages = create(kwargs)
        for stage in stages:
            stage["engine_args"].update(ours)
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
        given = {name: value for name, value in kwargs.items() if value is not None}
        # Mappings key by key, as this release does for a registered pipeline.
        return create(cls, model, kwargs | merged(_deploy_settings(deploy_config), given))

    return create_typed_default_diffusion


def _deploy_settings(path: str | None) -> dict[str, Any]:
    """What the first stage of a deploy YAML says of our settings.

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
    return {name: value for name, value in said.items() if value is not None}


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


def _default(name: str) -> Any:
    from vllm_omni.diffusion.data import OmniDiffusionConfig

    return OmniDiffusionConfig.__dataclass_fields__[name].default


def _host_fields() -> frozenset[str]:
    from vllm_omni.diffusion.data import OmniDiffusionConfig

    return frozenset(OmniDiffusionConfig.__dataclass_fields__)
