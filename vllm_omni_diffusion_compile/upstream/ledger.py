"""What this package touches in vLLM-Omni, in the order it is applied. `docs/grafts.md` is rendered from this table."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from vllm_omni_diffusion_compile.settings import CONFIG, OWN, VAE
from vllm_omni_diffusion_compile.upstream import (
    api,
    attention,
    cli,
    compile,
    config,
    engine,
    execution,
    inductor,
    metrics,
    minimax_h3,
    model_runner,
    report_route,
    required,
    serving_thread,
    shapes,
    transformer,
)
from vllm_omni_diffusion_compile.upstream.dataclass_field import NewField
from vllm_omni_diffusion_compile.upstream.graft import FieldGraft, Graft, applied

_VAE_COMPILE = "https://github.com/vllm-project/vllm-omni/pull/6010"
_HAS_VAE_COMPILE = "the oldest supported release has diffusion_compile_vae"
_STAGE_CONFIG = "vllm_omni.config.stage_config"
_OMNI_CONFIG = "vllm_omni.config.omni_config"
_DATA = "vllm_omni.diffusion.data"
_NEIGHBOUR = "diffusion_compile_dynamic"


def _unchanged(value: object) -> object:
    return value


# For each of our own settings: the proposal that gives it to the release, and when its rows can go.
_UPSTREAM = {
    VAE: (_VAE_COMPILE, _HAS_VAE_COMPILE),
    CONFIG: (
        "none yet: pull request 6010 adds diffusion_compile_vae alone",
        "the oldest supported release lets its users choose backend and mode",
    ),
}
_ALL_UPSTREAM = "none yet: pull request 6010 adds one of our settings, diffusion_compile_vae"
_HAS_ALL = "the oldest supported release has all of our settings"


def _fields(target: str, types: dict[str, tuple[object, object]], why: str) -> dict[str, FieldGraft]:
    """One field for each of our own settings; `types` has annotation and default by name."""
    return {
        name: FieldGraft(
            target=target,
            make=_unchanged,
            field=NewField(name=name, annotation=annotation, default=default, after=_NEIGHBOUR),
            why=why,
            upstream=_UPSTREAM[name][0],
            remove_when=_UPSTREAM[name][1],
        )
        for name, (annotation, default) in types.items()
    }


_MAPPING = "dict[str, Any] | None"
_UNSET: dict[str, tuple[object, object]] = {VAE: ("bool | None", None), CONFIG: (_MAPPING, None)}
DIFFUSION_CONFIG_FIELDS = _fields(
    f"{_DATA}:OmniDiffusionConfig",
    {VAE: (bool, True), CONFIG: (_MAPPING, None)},
    "The setting has to reach the worker: this is the configuration it is given.",
)
ORCHESTRATOR_FIELDS = _fields(
    "vllm_omni.engine.arg_utils:OrchestratorArgs", _UNSET, "A serve flag that no stage claims is dropped."
)
_PROJECTION_TYPES: dict[str, tuple[object, object]] = {
    VAE: (bool, Field(default=True, strict=True)),
    CONFIG: (Annotated[dict[str, Any] | None, BeforeValidator(config.projected_config)], None),
}
_FIELDS = (
    *_fields(f"{_STAGE_CONFIG}:StageDeployConfig", _UNSET, "A key of a stage in the deploy YAML.").values(),
    *_fields(
        f"{_OMNI_CONFIG}:_DiffusionConfigProjection", _PROJECTION_TYPES,
        "The projection forbids keys that it has no field for.",
    ).values(),
    *ORCHESTRATOR_FIELDS.values(),
    *DIFFUSION_CONFIG_FIELDS.values(),
)  # fmt: skip


def _natively_compiles_vae(_: ModuleType) -> bool:
    """The release has the setting itself: then it compiles VAE decode and warms it up, and all of ours steps aside."""
    data = sys.modules.get(_DATA)
    return (
        data is not None
        and VAE in data.OmniDiffusionConfig.__dataclass_fields__
        and not applied(DIFFUSION_CONFIG_FIELDS[VAE])
    )  # fmt: skip


def _constant(
    name: str, value: type, make: Callable[[Any], Any] = config.with_names, module: str = _OMNI_CONFIG
) -> Graft:
    return Graft(
        target=f"{module}:{name}",
        make=make,
        value=value,
        present=lambda module: set(OWN) <= set(getattr(module, name, ())),
        why="vLLM-Omni computed it at import from a configuration class's field names, before our fields were there.",
        upstream=_ALL_UPSTREAM,
        remove_when=_HAS_ALL,
    )


_BY_TYPE = "_STAGE_ENGINE_FIELDS_BY_EXECUTION_TYPE"
_CONSTANTS = (
    _constant("_STAGE_DEPLOY_FIELDS", dict, config.with_deploy_fields, _STAGE_CONFIG),
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
        present=lambda module: any(set(OWN) <= set(names) for names in getattr(module, _BY_TYPE, {}).values()),
        why="As above, for diffusion stages alone: a language-model stage keeps refusing the keys.",
        upstream=_ALL_UPSTREAM,
        remove_when=_HAS_ALL,
    ),
)


def _deploy_loader(module: str) -> Graft:
    return Graft(
        target=f"{module}:load_deploy_config",
        make=config.name_deploy_errors,
        parameters=("path",),
        why="A wrong value in a deploy YAML is refused later, without the file and the stage it stands in. The modules "
        "that read one have imported the function by name, before plugins are loaded.",
        upstream="none yet: the release refuses wrong values, as it should; only the place is missing",
        remove_when="the release names file and stage",
    )


_CHECKS = (
    # Before the row below on the same target, which checks the values first.
    Graft(
        target=f"{_DATA}:OmniDiffusionConfig.__post_init__",
        make=config.refuse_missing_adapters,
        parameters=("self",),
        why="A LoRA adapter of a declared shape that is not there would be missed after the weights are loaded.",
        upstream="https://github.com/vllm-project/vllm-omni/issues/6582",
        remove_when="the release warms shapes that its user declares",
    ),
    Graft(
        target=f"{_DATA}:OmniDiffusionConfig.__post_init__",
        make=functools.partial(config.check_values, ours=lambda name: applied(DIFFUSION_CONFIG_FIELDS[name])),
        parameters=("self",),
        why="A value that our fields cannot hold is refused like its neighbours'.",
        upstream=_ALL_UPSTREAM,
        remove_when=_HAS_ALL,
    ),
    *map(_deploy_loader, (_STAGE_CONFIG, "vllm_omni.config.config_factory", _OMNI_CONFIG)),
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
        target="vllm_omni.engine.async_omni_engine:load_and_resolve_stage_configs",
        make=config.remember_generic_stage,
        parameters=("model", "kwargs"),
        releases="<0.30",
        why="0.28.0 ignores --deploy-config and --stage-overrides for a generic single-stage model; ours are taken "
        "from them. A wrong mapping is refused here rather than in a worker.",
        upstream="none: the resolver was rewritten in 0.30.0",
        remove_when="0.28.0 is no longer supported",
    ),
    Graft(
        target="vllm_omni.engine.async_omni_engine:AsyncOmniEngine._create_default_diffusion_stage_cfg",
        make=config.complete_default_stage,
        parameters=("kwargs",),
        releases="<0.30",
        why="0.28.0 builds the default stage from an explicit dict, in which our keys vanish.",
        upstream=_ALL_UPSTREAM,
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
        # A release that has a flag has the field; only when the parser is built is vLLM-Omni sure to be imported.
        make=functools.partial(cli.add_flags, missing=lambda name: applied(ORCHESTRATOR_FIELDS[name])),
        parameters=("parser",),
        why="Plugins are loaded while the serve parser is being built; this is the first call after that.",
        upstream=_ALL_UPSTREAM,
        remove_when=_HAS_ALL,
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
    Graft(
        target="vllm_omni.entrypoints.omni:Omni.__init__",
        make=cli.give_omni_time_to_compile,
        parameters=("self", "model"),
        native=_natively_compiles_vae,
        why="The same for a program that uses Omni, which has the time-outs as keyword arguments.",
        upstream="none yet: see the row above",
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

_INDUCTOR = (
    Graft(
        target="vllm_omni.diffusion.worker.diffusion_model_runner:DiffusionModelRunner.load_model",
        make=inductor.prepare_inductor,
        parameters=("self",),
        why="Torch keeps what it compiles in the folder for temporary files, which no restart of a container outlives, "
        "and its compile workers take seconds to start. Before the weights are loaded, torch is told to use a private "
        "folder with what an earlier start has kept, and the workers start.",
        upstream="none yet: the release leaves both to torch",
        remove_when="the release keeps compiled artifacts of diffusion models",
    ),
)

_SCOPES = (
    Graft(
        target="vllm_omni.diffusion.worker.diffusion_model_runner:DiffusionModelRunner._compile_transformer",
        make=transformer.compile_scopes,
        parameters=("self", "attr_name"),
        why="The release compiles only models that declare _repeated_blocks, misses dotted component paths, logs "
        '"configured for lazy regional torch.compile" after it skipped, and lets a lazy compile error end the request.',
        upstream="https://github.com/vllm-project/vllm-omni/issues/6448",
        remove_when="the release finds dotted and undeclared blocks and survives the compiler",
    ),
    Graft(
        target="vllm_omni.diffusion.worker.diffusion_model_runner:enable_offload_backend",
        make=transformer.compile_with_own_backend,
        parameters=("od_config", "pipeline"),
        why="Where the platform has no inductor the release compiles nothing, even with a backend that works there. "
        "This is the last call before it would, with the offload hooks in place.",
        upstream="https://github.com/vllm-project/vllm-omni/pull/7580",
        remove_when="the release compiles with the backend that the platform or the user names",
    ),
    *(
        Graft(
            target=f"vllm_omni.diffusion.worker.diffusion_model_runner:DiffusionModelRunner.{execute}",
            make=transformer.agree_before,
            parameters=("self",),
            why="What fails to compile on one rank has to become eager on all: they agree before a request.",
            upstream="none yet: the release compiles without fallback",
            remove_when="the release falls back by itself, on all ranks",
        )
        for execute in ("execute_model", "execute_model_batch", "execute_stepwise")
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

_WORKER = "vllm_omni.diffusion.worker.diffusion_worker:DiffusionWorker"
_DECLARED = "https://github.com/vllm-project/vllm-omni/issues/6582"
_HAS_DECLARED = "the release warms shapes that its user declares"

_SHAPES = (
    # After the rows above on the same target: what the release and they warm comes first.
    Graft(
        target="vllm_omni.diffusion.diffusion_engine:DiffusionEngine.run_startup_warmup",
        make=shapes.declared_shapes_after_warmup,
        parameters=("self",),
        why="The release warms one size, and none of MiniMax-H3 and others; only the user knows what is served.",
        upstream=_DECLARED,
        remove_when=_HAS_DECLARED,
    ),
    Graft(
        target="vllm_omni.diffusion.executor.uniproc_executor:UniProcDiffusionExecutor.collective_rpc",
        make=serving_thread.ask_in_its_thread,
        parameters=("self", "method", "timeout", "args", "kwargs", "unique_reply_rank", "exec_all_ranks"),
        why="Torch keeps cuDNN's plans by thread, and the release serves in another one than it warms up in: they are "
        "made once more for each declared shape.",
        upstream="none yet: with one shape, which is what the release warms, it is little",
        remove_when="the release warms up in the thread that serves",
    ),
    Graft(
        target=f"{_WORKER}.diffusion_compile_usage",
        make=execution.add_compile_usage,
        adds=True,
        why="Only the worker knows what a request compiled, and when it began and ended to execute it.",
        upstream=_DECLARED,
        remove_when=_HAS_DECLARED,
    ),
    Graft(
        target=f"{_WORKER}.diffusion_compile_prompt",
        make=execution.add_compile_prompt,
        adds=True,
        why="A prompt of so many tokens is made with the tokenizer, which the worker has.",
        upstream=_DECLARED,
        remove_when=_HAS_DECLARED,
    ),
    Graft(
        target="vllm_omni.entrypoints.openai.api_server:router",
        make=report_route.with_report_route,
        value=object,
        why="`vllm-omni-compile report` asks a server what is warm.",
        upstream=_DECLARED,
        remove_when="the release shows what it warmed",
    ),
)

_NO_EVENTS = "none yet: no release records what the compiler did"
_HAS_EVENTS = "the release reports compilations on /metrics"


def _sends_events(method: str, parameters: tuple[str, ...]) -> Graft:
    return Graft(
        target=f"{_WORKER}.{method}",
        make=metrics.send_events,
        parameters=("self", *parameters),
        why="What was compiled for a request travels with its result, and the user who waited for it is told why.",
        upstream=_NO_EVENTS,
        remove_when=_HAS_EVENTS,
    )


_EVENTS = (
    _sends_events("execute_model", ("req", "od_config")),
    _sends_events("execute_model_batch", ("scheduler_output", "od_config")),
    _sends_events("execute_stepwise", ("scheduler_output",)),
    Graft(
        target=f"{_WORKER}.diffusion_compile_ready",
        make=metrics.add_compile_ready,
        adds=True,
        why="Only the engine knows when warmup is over, and only the worker what is compiled before and after.",
        upstream=_NO_EVENTS,
        remove_when=_HAS_EVENTS,
    ),
    # After the row of the warmup on the same target: what that compiles is still part of the start.
    Graft(
        target="vllm_omni.diffusion.diffusion_engine:DiffusionEngine.run_startup_warmup",
        make=metrics.ready_after_warmup,
        parameters=("self",),
        why="Tells the workers that warmup is over, and sums up in one line what was compiled until then.",
        upstream=_NO_EVENTS,
        remove_when=_HAS_EVENTS,
    ),
    Graft(
        target="vllm_omni.diffusion.diffusion_engine:DiffusionEngine.postprocess_output",
        make=metrics.forward_events,
        parameters=("self", "request", "output"),
        why="A stage in a process of its own sends only what is in the formatted output.",
        upstream=_NO_EVENTS,
        remove_when=_HAS_EVENTS,
    ),
    Graft(
        target="vllm_omni.metrics.prometheus:OmniPrometheusMetrics.__init__",
        make=metrics.register_families,
        parameters=("self", "model_name", "log_stats"),
        why="Our metric families are where the host's are, under the same model name, and off where those are off.",
        upstream=_NO_EVENTS,
        remove_when=_HAS_EVENTS,
    ),
    Graft(
        target="vllm_omni.diffusion.inline_stage_diffusion_client:InlineStageDiffusionClient.get_diffusion_output_nowait",
        make=metrics.count_of_this_process,
        parameters=("self",),
        why="Counts what was compiled, and takes it out of the output before anybody else sees it.",
        upstream=_NO_EVENTS,
        remove_when=_HAS_EVENTS,
    ),
    Graft(
        target="vllm_omni.diffusion.stage_diffusion_client:StageDiffusionClient.get_diffusion_output_nowait",
        make=metrics.count_of_other_process,
        parameters=("self",),
        why="As above, for a stage in a process of its own.",
        upstream=_NO_EVENTS,
        remove_when=_HAS_EVENTS,
    ),
)

_ATTENTION = (
    Graft(
        target="vllm_omni.diffusion.attention.backends.rainfusion_attn:RainFusionAttentionBackend",
        make=attention.run_everywhere,
        value=type,
        why="The release's backend runs on Ascend NPU only, and leaves a grid that is no multiple of 8 to MindIE-SD, "
        "which neither promotes its tail nor protects the seam to the prefix.",
        upstream="none yet: issue 6000 tells of 1344x768, which stays dense",
        remove_when="the release's backend runs on CUDA and CPU, and its own order promotes tails on all platforms",
    ),
)

_NO_BUCKETS = "none yet: no release chooses a packed length by itself"
_HAS_BUCKETS = "the release pads MiniMax-H3 requests to lengths that the server states"
_NO_CHECK = "none yet: 0.30.0 checks pad_seq_len in the worker, after the encoders ran, and loses the status on the way"
_HAS_CHECK = "the oldest supported release checks pad_seq_len where requests come in"
_H3 = "vllm_omni.diffusion.models.minimax_h3.pipeline_minimax_h3"
_H3_PIPELINE = f"{_H3}:MiniMaxH3Pipeline"
_OPENAI = "vllm_omni.entrypoints.openai"

_PACKED_LENGTH = (
    Graft(
        target=f"{_H3_PIPELINE}.__init__",
        make=minimax_h3.read_buckets,
        parameters=("self", "od_config"),
        why="Reads pad_seq_buckets, and refuses at the start what the ranks of sequence parallelism cannot share.",
        upstream=_NO_BUCKETS,
        remove_when=_HAS_BUCKETS,
    ),
    Graft(
        target=f"{_H3_PIPELINE}.forward",
        make=minimax_h3.hold_for_request,
        parameters=("self", "request"),
        why="A request's own pin and the server's buckets are needed where it is packed, which sees neither; a bad pin "
        "is refused here before anything is encoded.",
        upstream=_NO_BUCKETS,
        remove_when=_HAS_BUCKETS,
    ),
    Graft(
        target=f"{_H3_PIPELINE}.prepare_encode",
        make=minimax_h3.hold_for_steps,
        parameters=("self", "state"),
        why="As above, for a server that runs single steps.",
        upstream=_NO_BUCKETS,
        remove_when=_HAS_BUCKETS,
    ),
    *(
        Graft(
            target=f"{_H3}:{packer}",
            make=minimax_h3.pad_packed,
            parameters=("text_len", "latent_t", "latent_h", "latent_w", "audio_t"),
            why="Each prompt length has a packed length of its own, which is compiled by itself with static shapes. "
            "Here a request gets the shortest bucket that holds it; 0.28.0 gets the pin of 0.30.0.",
            upstream=_NO_BUCKETS,
            remove_when=_HAS_BUCKETS,
        )
        for packer in ("minimax_h3_packed_sequence", "minimax_h3_packed_sequence_ref2va_blocks")
    ),
    Graft(
        target="vllm_omni.diffusion.worker.diffusion_worker:DiffusionWorker.execute_model",
        make=minimax_h3.answer_refusals,
        parameters=("self", "req", "od_config"),
        why="The executors keep only the text of what a worker raises, so a pin that the prompt makes too small was "
        "answered as a server error. An output with an error keeps its status.",
        upstream=_NO_CHECK,
        remove_when="the executors keep the status of a client's error",
    ),
    Graft(
        target=f"{_OPENAI}.serving_video:OmniOpenAIServingVideo.__init__",
        make=api.remember_engine,
        parameters=("self", "engine_client"),
        why="A video request is checked where it is made, which knows nothing of the served model.",
        upstream=_NO_CHECK,
        remove_when=_HAS_CHECK,
    ),
    Graft(
        target=f"{_OPENAI}.protocol.videos:VideoGenerationRequest.__init__",
        make=api.check_video_request,
        parameters=("self",),
        why="The first that both video endpoints make of a form, and the streaming one of a message: before references "
        "are downloaded or stored, and before a job is queued.",
        upstream=_NO_CHECK,
        remove_when=_HAS_CHECK,
    ),
    Graft(
        target=f"{_OPENAI}.serving_chat:OmniOpenAIServingChat.create_chat_completion",
        make=api.check_chat,
        parameters=("self", "request"),
        why="A chat request is checked before its media are loaded.",
        upstream=_NO_CHECK,
        remove_when=_HAS_CHECK,
    ),
    Graft(
        target="vllm_omni.entrypoints.async_omni:AsyncOmni.generate",
        make=api.check_async,
        parameters=("self", "prompt", "sampling_params"),
        why="Whatever else comes in over HTTP passes here before it is queued.",
        upstream=_NO_CHECK,
        remove_when=_HAS_CHECK,
    ),
    Graft(
        target="vllm_omni.entrypoints.omni:Omni.generate",
        make=api.check_offline,
        parameters=("self", "prompts", "sampling_params_list"),
        why="A program that uses Omni gets the error at once, and its engine stays open.",
        upstream=_NO_CHECK,
        remove_when=_HAS_CHECK,
    ),
)

_EVIDENCE = (
    # After the rows above on the same target, so that it is looked at before anything else is done.
    Graft(
        target="vllm_omni.diffusion.worker.diffusion_model_runner:DiffusionModelRunner.load_model",
        make=required.refuse_without_evidence,
        parameters=("self",),
        why="A deployment can demand a validated row for what it starts; hardware and configuration are both known in "
        "the worker only, and it is refused before weights are loaded.",
        upstream="none yet: the release knows nothing of evidence",
        remove_when="the release refuses combinations that nobody has qualified",
    ),
)

GRAFTS: tuple[Graft, ...] = (
    *_FIELDS,
    *_CONSTANTS,
    *_CHECKS,
    *_GENERIC_STAGE,
    *_FLAGS,
    *_SCOPES,
    *_INDUCTOR,
    *_COMPILE,
    *_WARMUP,
    *_SHAPES,
    *_EVENTS,
    *_ATTENTION,
    *_PACKED_LENGTH,
    *_EVIDENCE,
)
