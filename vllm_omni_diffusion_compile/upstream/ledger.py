"""What this package touches in vLLM-Omni, in the order it is applied. `docs/grafts.md` is rendered from this table."""

from __future__ import annotations

import functools
import sys
from types import ModuleType

from pydantic import Field

from vllm_omni_diffusion_compile.settings import VAE
from vllm_omni_diffusion_compile.upstream import cli, compile, config, engine, model_runner
from vllm_omni_diffusion_compile.upstream.dataclass_field import NewField
from vllm_omni_diffusion_compile.upstream.graft import FieldGraft, Graft, applied

TESTED_RELEASES = ">=0.28.0,<0.31"

_VAE_COMPILE = "https://github.com/vllm-project/vllm-omni/pull/6010"
_HAS_VAE_COMPILE = "the oldest supported release has diffusion_compile_vae"
_STAGE_CONFIG = "vllm_omni.config.stage_config"
_OMNI_CONFIG = "vllm_omni.config.omni_config"
_DATA = "vllm_omni.diffusion.data"
_NEIGHBOUR = "diffusion_compile_dynamic"


def _unchanged(value: object) -> object:
    return value


def _field(target: str, annotation: object, default: object, why: str) -> FieldGraft:
    return FieldGraft(
        target=target,
        make=_unchanged,
        field=NewField(name=VAE, annotation=annotation, default=default, after=_NEIGHBOUR),
        why=why,
        upstream=_VAE_COMPILE,
        remove_when=_HAS_VAE_COMPILE,
    )


DIFFUSION_CONFIG_FIELD = _field(
    f"{_DATA}:OmniDiffusionConfig",
    bool,
    True,
    "The setting has to reach the worker: this is the configuration it is given.",
)
ORCHESTRATOR_FIELD = _field(
    "vllm_omni.engine.arg_utils:OrchestratorArgs", "bool | None", None, "A serve flag that no stage claims is dropped."
)
_FIELDS = (
    _field(f"{_STAGE_CONFIG}:StageDeployConfig", "bool | None", None, "A key of a stage in the deploy YAML."),
    _field(
        f"{_OMNI_CONFIG}:_DiffusionConfigProjection", bool, Field(default=True, strict=True),
        "The projection forbids keys that it has no field for.",
    ),
    ORCHESTRATOR_FIELD,
    DIFFUSION_CONFIG_FIELD,
)  # fmt: skip


def _natively_compiles_vae(_: ModuleType) -> bool:
    """The release has the setting itself: then it compiles VAE decode and warms it up, and all of ours steps aside."""
    data = sys.modules.get(_DATA)
    return (
        data is not None
        and VAE in data.OmniDiffusionConfig.__dataclass_fields__
        and not applied(DIFFUSION_CONFIG_FIELD)
    )  # fmt: skip


def _constant(name: str, value: type, make: object = config.with_name, module: str = _OMNI_CONFIG) -> Graft:
    return Graft(
        target=f"{module}:{name}",
        make=make,  # type: ignore[arg-type]
        value=value,
        present=lambda module: VAE in getattr(module, name, ()),
        why="vLLM-Omni computed it at import from a configuration class's field names, before our field was there.",
        upstream=_VAE_COMPILE,
        remove_when=_HAS_VAE_COMPILE,
    )


_BY_TYPE = "_STAGE_ENGINE_FIELDS_BY_EXECUTION_TYPE"
_CONSTANTS = (
    _constant("_STAGE_DEPLOY_FIELDS", dict, config.with_deploy_field, _STAGE_CONFIG),
    _constant("_STAGE_DEPLOY_ENGINE_FIELDS", tuple),
    _constant("_DIFFUSION_CONFIG_FIELDS", frozenset),
    _constant("_DIFFUSION_ONLY_CONFIG_FIELDS", frozenset),
    _constant("_DIFFUSION_STAGE_ENGINE_FIELDS", frozenset),
    _constant("_DIFFUSION_OWNED_STAGE_ENGINE_FIELDS", frozenset),
    _constant("_STAGE_ENGINE_FIELDS", frozenset),
    Graft(
        target=f"{_OMNI_CONFIG}:{_BY_TYPE}",
        make=config.for_diffusion_stages,
        value=dict,
        present=lambda module: any(VAE in names for names in getattr(module, _BY_TYPE, {}).values()),
        why="As above, for diffusion stages alone: a language-model stage keeps refusing the key.",
        upstream=_VAE_COMPILE,
        remove_when=_HAS_VAE_COMPILE,
    ),
)

_CHECKS = (
    Graft(
        target=f"{_DATA}:OmniDiffusionConfig.__post_init__",
        make=config.check_type,
        parameters=("self",),
        native=_natively_compiles_vae,
        why="A value that is no bool is refused like its neighbours'.",
        upstream=_VAE_COMPILE,
        remove_when=_HAS_VAE_COMPILE,
    ),
    Graft(
        target=f"{_DATA}:OmniDiffusionConfig.__post_init__",
        make=config.refuse_full_with_distributed_offload,
        parameters=("self",),
        releases="<0.30",
        why="0.28.0 accepts full scope with distributed layerwise offload, which would compile the offload's own "
        "control flow; it refuses the other kinds of offload.",
        upstream="none: 0.30.0 refuses it",
        remove_when="0.28.0 is no longer supported",
    ),
    Graft(
        target=f"{_DATA}:normalize_omni_diffusion_kwargs",
        make=config.check_names,
        parameters=("kwargs",),
        releases="<0.30",
        why="0.28.0 drops a misspelt diffusion_compile_* name in silence.",
        upstream="none: 0.30.0 refuses unknown names",
        remove_when="0.28.0 is no longer supported",
    ),
    Graft(
        target=f"{_DATA}:normalize_omni_diffusion_kwargs",
        make=config.check_names,
        parameters=("raw_kwargs",),
        releases=">=0.30",
        why="0.30.0 refuses a misspelt diffusion_compile_* name without saying which was meant.",
        upstream="none yet: the release refuses the name, as it should; only the hint is missing",
        remove_when="the release suggests the near name",
    ),
    Graft(
        target=f"{_OMNI_CONFIG}:_DiffusionConfigProjection.__init__",
        make=config.check_keywords,
        releases="<0.30",
        why="0.28.0's projection ignores keywords that it does not know.",
        upstream="none: 0.30.0 forbids them",
        remove_when="0.28.0 is no longer supported",
    ),
)

_GENERIC_STAGE = (
    Graft(
        target="vllm_omni.engine.async_omni_engine:AsyncOmniEngine._resolve_stage_configs",
        make=config.remember_generic_stage,
        parameters=("self", "model", "kwargs"),
        releases="<0.30",
        why="0.28.0 ignores --deploy-config and --stage-overrides for a generic single-stage model; ours are taken "
        "from them.",
        upstream="none: the resolver was rewritten in 0.30.0",
        remove_when="0.28.0 is no longer supported",
    ),
    Graft(
        target="vllm_omni.engine.async_omni_engine:AsyncOmniEngine._create_default_diffusion_stage_cfg",
        make=config.complete_default_stage,
        parameters=("kwargs",),
        releases="<0.30",
        why="0.28.0 builds the default stage from an explicit dict, in which the key vanishes.",
        upstream=_VAE_COMPILE,
        remove_when="0.28.0 is no longer supported",
    ),
    Graft(
        target="vllm_omni.config.config_factory:StageConfigFactory.create_from_model",
        make=config.remember_ignored_yaml,
        parameters=("cls", "model"),
        releases=">=0.30",
        why="0.30.0 ignores the whole --deploy-config for a generic single-stage model, in silence.",
        upstream="none yet: whether to read such a YAML or to refuse it is upstream's to decide",
        remove_when="the release reads the YAML of a generic model, or refuses it",
    ),
    Graft(
        target="vllm_omni.config.config_factory:StageConfigFactory.create_typed_default_diffusion",
        make=config.apply_ignored_yaml,
        parameters=("cls", "model", "kwargs"),
        releases=">=0.30",
        why="Second half of the row above: our keys and enforce_eager take effect, and what does not is named.",
        upstream="none yet: see the row above",
        remove_when="the release reads the YAML of a generic model, or refuses it",
    ),
)

_FLAGS = (
    Graft(
        target="vllm.engine.arg_utils:EngineArgs.add_cli_args",
        # A release that has the flag has the field; only when the parser is built is vLLM-Omni sure to be imported.
        make=functools.partial(cli.add_flags, missing=lambda: applied(ORCHESTRATOR_FIELD)),
        parameters=("parser",),
        why="Plugins are loaded while the serve parser is being built; this is the first call after that.",
        upstream=_VAE_COMPILE,
        remove_when=_HAS_VAE_COMPILE,
    ),
    Graft(
        target="vllm_omni.entrypoints.cli.serve:OmniServeCommand.validate",
        make=cli.name_flags_without_effect,
        parameters=("self", "args"),
        why="--compilation-config and -O are accepted and reach no diffusion stage; the user is told.",
        upstream="none yet: the flags are valid, they only have no effect on these stages",
        remove_when="the release says so itself",
    ),
    Graft(
        target="vllm_omni.entrypoints.cli.serve:OmniServeCommand.validate",
        make=cli.give_time_to_compile,
        parameters=("self", "args"),
        native=_natively_compiles_vae,
        why="Compiling and warming up count against --stage-init-timeout (300 s) and --init-timeout (600 s): a large "
        "model that started before would not start any more.",
        upstream="none yet: the defaults fit what the release itself compiles at start",
        remove_when="the release's defaults leave room for compiling",
    ),
)

_COMPILE = (
    Graft(
        target="vllm_omni.diffusion.compile:compile_callable_with_fallback",
        make=compile.add_compile_callable,
        adds=True,
        why="The name that the upstream change gives it; VAE decode is compiled through it.",
        upstream=_VAE_COMPILE,
        remove_when=_HAS_VAE_COMPILE,
    ),
    Graft(
        target="vllm_omni.diffusion.worker.diffusion_model_runner:compile_callable_with_fallback",
        make=compile.add_compile_callable,
        adds=True,
        why="The runner's module uses it under its own name, as it does regionally_compile.",
        upstream=_VAE_COMPILE,
        remove_when=_HAS_VAE_COMPILE,
    ),
    Graft(
        target="vllm_omni.diffusion.worker.diffusion_model_runner:DiffusionModelRunner._compile_vae_decodes",
        make=model_runner.add_compile_vae_decodes,
        adds=True,
        why="VAE decode is a quarter of an image's time and no release compiles it.",
        upstream=_VAE_COMPILE,
        remove_when=_HAS_VAE_COMPILE,
    ),
    Graft(
        target="vllm_omni.diffusion.worker.diffusion_model_runner:DiffusionModelRunner.load_model",
        make=model_runner.compile_vae_after_load,
        parameters=("self",),
        native=_natively_compiles_vae,
        why="Calls the method above once the pipeline is loaded and its transformer set up.",
        upstream=_VAE_COMPILE,
        remove_when=_HAS_VAE_COMPILE,
    ),
    Graft(
        target="vllm_omni.diffusion.worker.diffusion_worker:DiffusionWorker.diffusion_compile_facts",
        make=model_runner.add_compile_facts,
        adds=True,
        native=_natively_compiles_vae,
        why="With worker processes only the worker knows what was compiled; the warmup asks it by RPC.",
        upstream="none yet: only the warmup of this package asks for it",
        remove_when="the release reports compilations to the engine",
    ),
)

_WARMUP = (
    Graft(
        target="vllm_omni.diffusion.diffusion_engine:DiffusionEngine._dummy_run",
        make=engine.real_request_after_dummy_run,
        parameters=("self",),
        native=_natively_compiles_vae,
        why="The dummy run takes other branches than a request (13 model files), so users met uncompiled code after "
        "ready.",
        upstream=_VAE_COMPILE,
        remove_when=_HAS_VAE_COMPILE,
    ),
    Graft(
        target="vllm_omni.diffusion.diffusion_engine:DiffusionEngine.run_startup_warmup",
        make=engine.further_sizes_after_warmup,
        parameters=("self",),
        native=_natively_compiles_vae,
        why="dynamic=None compiles decode as static at its first size and as dynamic at its second: the user waited "
        "for that.",
        upstream="none yet: pull request 6010 warms one size",
        remove_when="the release warms decode at a second size",
    ),
)

GRAFTS: tuple[Graft, ...] = (*_FIELDS, *_CONSTANTS, *_CHECKS, *_GENERIC_STAGE, *_FLAGS, *_COMPILE, *_WARMUP)
