"""What can be compared: names, and the settings that they stand for."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vllm_omni_diffusion_compile.errors import BenchError
from vllm_omni_diffusion_compile.settings import CONFIG, VAE, merged

EAGER = "eager"
DEFAULT = (EAGER, "regional-dynamic", "regional-dynamic+vae")
_BASES = (EAGER, "regional-dynamic", "regional-static", "full-dynamic", "full-static")
DESCRIPTION = (
    f"{', '.join(_BASES)} (regional and full alone are the dynamic ones); to each but eager +vae can be added, which "
    "compiles VAE decode, and to each, of a video model, +rainfusion, which is block-sparse attention"
)

GRANULARITY, DYNAMIC = "diffusion_compile_granularity", "diffusion_compile_dynamic"
ATTENTION = "diffusion_attention_config"
_SPARSE = {"default": {"backend": "RAINFUSION_ATTN", "block_sparse": {"sparsity": 0.8}}}
# What the bench itself says to every server.
_OURS = {
    "omni": "every arm has it",
    "host": "the bench asks on this machine",
    "port": "the bench takes a free one",
    "api_key": "set VLLM_API_KEY, which is not written into the result",
    "hf_token": "set HF_TOKEN, which is not written into the result",
}


@dataclass(frozen=True)
class Arm:
    """One way to run a model.

    Args:
        scope: What of the transformer is compiled, or nothing.
        dynamic: Whether it is compiled for any shape; of no meaning to eager.
        vae: Whether VAE decode is compiled.
        rainfusion: Whether attention is block-sparse. Its output is another one.
    """

    scope: Literal["eager", "regional", "full"]
    dynamic: bool = True
    vae: bool = False
    rainfusion: bool = False

    @property
    def name(self) -> str:
        """As it is typed."""
        base = EAGER if self.scope == EAGER else f"{self.scope}-{'dynamic' if self.dynamic else 'static'}"
        return base + "+vae" * self.vae + "+rainfusion" * self.rainfusion

    @property
    def settings(self) -> dict[str, Any]:
        """What is set, as keyword arguments of `Omni`."""
        settings: dict[str, Any] = (
            {"enforce_eager": True}
            if self.scope == EAGER
            else {GRANULARITY: self.scope, DYNAMIC: self.dynamic, VAE: self.vae}
        )
        return settings | ({ATTENTION: _SPARSE} if self.rainfusion else {})


def read_arms(names: Sequence[str], task: str | None = None) -> list[Arm]:
    """Read names of arms, in the order in which they are given.

    Args:
        names: At least one.
        task: What the model makes, where that is known.

    Raises:
        BenchError: One is unknown, contradicts itself or the task, or is there twice.
    """
    arms = [_read(name.strip()) for name in names]
    for arm, name in zip(arms, names, strict=True):
        if arms.count(arm) > 1:
            raise BenchError(f"--arm {name} is {arm.name}, which is there twice; leave one out")
        if arm.rainfusion and task == "image":
            raise BenchError(
                f"--arm {name}: RainFusion leaves out pairs of a video's rows, and this model makes images; leave "
                "+rainfusion out"
            )
    return arms


def _read(name: str) -> Arm:
    base, *added = name.split("+")
    base = f"{base}-dynamic" if base in ("regional", "full") else base
    unknown = [word for word in added if word not in ("vae", "rainfusion")]
    if base not in _BASES or unknown or len(set(added)) < len(added):
        raise BenchError(f"--arm {name} is no arm; there are {DESCRIPTION}")
    if base == EAGER and "vae" in added:
        raise BenchError(f"--arm {name} contradicts itself: eager compiles nothing, VAE decode neither; use eager")
    scope, _, kind = base.partition("-")
    return Arm(
        scope=scope,  # type: ignore[arg-type]  # one of _BASES
        dynamic=kind != "static",
        vae="vae" in added,
        rainfusion="rainfusion" in added,
    )


def check_arguments(arguments: Sequence[str], arms: Iterable[Arm]) -> None:
    """Refuse arguments for every `vllm serve` that would say something else than an arm or the bench does.

    Raises:
        BenchError: One does.
    """
    decided = {name for arm in arms for name in arm.settings} | {"enforce_eager", GRANULARITY, DYNAMIC, VAE}
    for name, value in given(arguments).items():
        if name in decided:
            typed = _flag(f"no_{name}" if value is False else name)
            raise BenchError(f"{typed} after -- is what the arms differ in; leave it out, and choose with --arm")
        if name in _OURS:
            raise BenchError(f"{_flag(name)} after --: leave it out; {_OURS[name]}")
        if name == CONFIG:
            _check_config(value)


def _check_config(config: object) -> None:
    warmup = config.get("warmup") if isinstance(config, Mapping) else None
    if isinstance(config, Mapping) and "cache_dir" in config:
        raise BenchError(f"{_flag(CONFIG)}.cache_dir after --: every arm has a private one; leave it out")
    if isinstance(warmup, Mapping) and "shapes" in warmup:
        raise BenchError(f"{_flag(CONFIG)}.warmup.shapes after --: what --shape names is declared; leave it out")


def given(arguments: Sequence[str]) -> dict[str, Any]:
    """Read flags of `vllm serve` as keyword arguments: `--trust-remote-code`, `--dtype bfloat16`, `--no-x`.

    Raises:
        BenchError: Something among them is no flag.
    """
    found: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        flag = rest.pop(0)
        if not re.match(r"--?[A-Za-z]", flag):
            raise BenchError(f"{flag!r} after -- belongs to no flag; expected flags of vllm serve")
        flag, equals, value = flag.partition("=")
        read: Any = True
        if equals:
            read = _value(value)
        elif rest and not re.match(r"--?[A-Za-z]", rest[0]):
            values = [rest.pop(0)]
            while rest and not re.match(r"--?[A-Za-z]", rest[0]):
                values.append(rest.pop(0))
            read = _value(values[0]) if len(values) == 1 else [_value(value) for value in values]
        names = flag.lstrip("-").replace("-", "_").split(".")
        if read is True and names[0].startswith("no_"):
            names[0], read = names[0].removeprefix("no_"), False
        for name in reversed(names[1:]):  # `--option.key value`
            read = {name: read}
        first, before = names[0], found.get(names[0])
        found[first] = merged(before, read) if isinstance(before, dict) and isinstance(read, dict) else read
    return found


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def as_flags(settings: Mapping[str, Any]) -> list[str]:
    """Spell settings as flags of `vllm serve`."""
    flags: list[str] = []
    for name, value in settings.items():
        if isinstance(value, bool):
            flags.append(_flag(name if value else f"no_{name}"))
        else:
            flags += [_flag(name), json.dumps(value) if isinstance(value, (dict, list)) else str(value)]
    return flags


def pasted(arguments: Iterable[str]) -> str:
    """Return arguments as they are typed in a shell."""
    return shlex.join(arguments)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
