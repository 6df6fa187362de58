"""Every setting of a stage as its workers get it, and the surface that it came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from vllm_omni_diffusion_compile.doctor.finding import Finding
from vllm_omni_diffusion_compile.errors import SettingError
from vllm_omni_diffusion_compile.settings import CONFIG, NAMES, DiffusionCompileSettings, read_config
from vllm_omni_diffusion_compile.upstream.inspection.serve_line import Line, RefusedLineError, Stage, read_line

_EAGER, _DEFAULT = "enforce_eager", "default"
_NOT_HERE = (
    "is not on this machine, and the network is not used: its stages, and what the release refuses of them, are known "
    "when it is here"
)
_NO_PIPELINE = (
    "names no pipeline: with a generic single-stage model vLLM-Omni reads none of it, and this package takes its own "
    "settings from it; whether yours is one is known with the model: --config FILE.yaml -- vllm serve MODEL --omni"
)
_REFUSED = "correct it there: a server refuses it in the same words, before it loads anything"
_NO_OMNI = "there is no --omni, so vLLM serves a language model and this package does nothing"
_WARNED_BEFORE = "do as it says: a server warns in its log in the same words, before it ends for what is refused below"
_WARNED = "do as it says: a server starts all the same, and warns in its log in the same words"


@dataclass(frozen=True, kw_only=True)
class ResolvedSetting(Finding):
    """A setting of one stage.

    Args:
        value: As the workers get it.
        source: Where it was said: a flag, a stage override, a key of the deploy YAML; or `default`.
    """

    value: Any
    source: str


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """What a command line or a deploy YAML comes to.

    Args:
        findings: Facts about it.
        stages: Its diffusion stages, as far as they are known.
        settings: Of the stages, in the same order; of what was typed alone where no stage is known.
    """

    findings: tuple[Finding, ...]
    stages: tuple[Stage, ...] = ()
    settings: tuple[DiffusionCompileSettings, ...] = ()

    @property
    def compiles_nothing(self) -> bool:
        """Whether every stage that is known is eager."""
        said = [
            finding.value
            for finding in self.findings
            if isinstance(finding, ResolvedSetting) and finding.name.endswith(_EAGER)
        ]
        return bool(said) and all(said)


def resolve_line(words: list[str]) -> Resolution:
    """Resolve a `vllm serve` command line."""
    if "--omni" not in words:
        return Resolution(findings=(Finding.broken("command line", _NO_OMNI, "add --omni"),))
    try:
        line = read_line(words)
    except RefusedLineError as error:
        warned = [Finding.limit("command line", said, _WARNED_BEFORE) for said in error.warnings]
        return Resolution(findings=(*warned, Finding.broken("command line", str(error), _REFUSED)))
    findings = [Finding.ok("command line", "the release accepts it")]
    findings += [Finding.limit("command line", said, _WARNED) for said in line.warnings]
    if line.stages is None:
        return _typed_alone(line, findings)
    if not line.stages:
        findings.append(
            Finding.limit(
                "stages",
                f"{line.model} has no diffusion stage: this package does nothing",
                "nothing, if that is the model you mean to serve",
            )
        )
    surfaces = [_surfaces(line, stage.number) for stage in line.stages]
    for stage, surface in zip(line.stages, surfaces, strict=True):
        findings += resolved(f"stages[{stage.number}].", stage.config, surface)
    settings = tuple(DiffusionCompileSettings.of(stage.config) for stage in line.stages)
    return Resolution(findings=tuple(findings), stages=line.stages, settings=settings)


def resolve_yaml(path: str) -> Resolution:
    """Resolve a deploy YAML by itself: what its stages say, whatever model it is for."""
    from vllm_omni.config import stage_config

    from vllm_omni_diffusion_compile.settings import refuse_near_misses

    findings: list[Finding] = []
    settings: list[DiffusionCompileSettings] = []
    try:
        deploy = stage_config.load_deploy_config(path)
        for stage in deploy.stages:
            refuse_near_misses(stage.engine_extras)
            settings.append(DiffusionCompileSettings.of(stage))
            surface = {f"{path}: stages[{stage.stage_id}].{{name}}": _said(vars(stage))}
            findings += resolved(f"stages[{stage.stage_id}].", stage, surface)
    except Exception as error:  # noqa: BLE001 - whatever the release raises of a YAML ends the start of a server
        return Resolution(findings=(Finding.broken("deploy YAML", str(error), _REFUSED),))
    named = getattr(deploy, "pipeline", None)
    if named is None:
        findings.insert(
            0,
            Finding.unknown("deploy YAML", f"{path} {_NO_PIPELINE}"),
        )
    else:
        findings.insert(0, Finding.ok("deploy YAML", f"{path}, of the pipeline {named}"))
    return Resolution(findings=tuple(findings), settings=tuple(settings))


def resolved(prefix: str, config: object, surfaces: Mapping[str, Mapping[str, Any]]) -> Iterator[ResolvedSetting]:
    """Yield every setting of a configuration.

    Args:
        prefix: Of their names.
        config: Has the settings as attributes; None is the default.
        surfaces: What was said where, the surface that wins first; `{name}` in its name stands for the setting's.
    """
    settings = DiffusionCompileSettings.of(config)
    mapping = settings.diffusion_compile_config
    values = {name: getattr(settings, name) for name in NAMES if name != CONFIG}
    values[_EAGER] = bool(getattr(config, _EAGER, False))
    values |= _flat({CONFIG: mapping.model_dump(mode="json", exclude_unset=True)})
    left_out = mapping.model_dump(mode="json", exclude=set(mapping.model_fields_set))
    values |= {f"{CONFIG}.{key}": value for key, value in left_out.items()}
    for name, value in values.items():
        source = _source(name, value, surfaces)
        yield ResolvedSetting(
            name=f"{prefix}{name}",
            state="ok",
            found=f"{value!r} ({source})",
            group=source if source == _DEFAULT else "",
            value=value,
            source=source,
        )


def _source(name: str, value: Any, surfaces: Mapping[str, Mapping[str, Any]]) -> str:
    for surface, said in surfaces.items():
        if name in said and said[name] == value:
            return surface.format(name=name, flag=_flag(name, value))
    return _DEFAULT


def _flag(name: str, value: Any) -> str:
    """Return a setting's flag as it is typed: `--no-diffusion-compile-vae`, `--diffusion-compile-config.mode`."""
    setting, dot, key = name.partition(".")
    return f"--{'no-' if value is False and not dot else ''}{setting.replace('_', '-')}{dot}{key}"


def _surfaces(line: Line, number: int) -> dict[str, dict[str, Any]]:
    """What was said of a stage where; the first of them wins."""
    surfaces = {
        f'--stage-overrides["{number}"].{{name}}': _said(line.overrides.get(str(number), {})),
        "{flag}": _said(line.flags),
    }
    if line.deploy_config is not None:
        from vllm_omni.config.config_factory import StageConfigFactory

        deploy = StageConfigFactory._load_user_deploy_config(line.deploy_config)
        stage = next((stage for stage in deploy.stages if stage.stage_id == number), None)
        if stage is not None:
            surfaces[f"{line.deploy_config}: stages[{number}].{{name}}"] = _said(vars(stage))
    return surfaces


def _said(given: Mapping[str, Any]) -> dict[str, Any]:
    """Take our settings, key by key, out of what one surface says."""
    ours = {name: given.get(name) for name in (*NAMES, _EAGER)}
    if ours[CONFIG] is not None:
        ours[CONFIG] = read_config(ours[CONFIG]).model_dump(mode="json", exclude_unset=True)
    return {name: value for name, value in _flat(ours).items() if value is not None}


def _flat(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        elif not isinstance(value, Mapping):
            flat[f"{prefix}{key}"] = value
    return flat


def _typed_alone(line: Line, findings: list[Finding]) -> Resolution:
    """Judge what was typed where the model's files are not there to say what it comes to."""
    findings.append(Finding.unknown("model", f"{line.model} {_NOT_HERE}"))
    config = SimpleNamespace(**line.flags)
    try:
        settings = DiffusionCompileSettings.of(config)
    except SettingError as error:
        return Resolution(findings=(Finding.broken("command line", str(error), _REFUSED),))
    findings += resolved("", config, {"{flag}": _said(line.flags)})
    return Resolution(findings=tuple(findings), settings=(settings,))
