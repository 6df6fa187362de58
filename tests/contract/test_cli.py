"""The flags of `vllm serve --omni`, on the parser that the installed release builds."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.host import serve_parser
from vllm_omni_diffusion_compile.upstream import cli

pytestmark = pytest.mark.contract
FLAG = "--diffusion-compile-vae"
CONFIG = "--diffusion-compile-config"
TUNED = "max-autotune-no-cudagraphs"


@pytest.fixture(scope="module")
def parser() -> Iterator[Any]:
    with serve_parser() as built:
        yield built


def parse(parser: Any, *flags: str) -> Any:
    return parser.parse_args(["serve", "MODEL", "--omni", *flags])


@pytest.mark.parametrize(("flags", "value"), [((), None), ((FLAG,), True), (("--no-diffusion-compile-vae",), False)])
def test_the_flag_says_yes_no_or_nothing(parser: Any, flags: tuple[str, ...], value: bool | None) -> None:
    args = parse(parser, *flags)
    assert args.diffusion_compile_vae is value
    # Only what the user typed is handed on; a default would win over the deploy YAML.
    assert ("diffusion_compile_vae" in args.get_explicit_kwargs_dict()) == (value is not None)


@pytest.mark.parametrize(
    ("flags", "value"),
    [
        ((), None),
        ((CONFIG, "{}"), {}),
        ((CONFIG, f'{{"mode": "{TUNED}"}}'), {"mode": TUNED}),
        ((f'{CONFIG}={{"infer_regions": false}}',), {"infer_regions": False}),
        ((f"{CONFIG}.mode", TUNED), {"mode": TUNED}),
        ((f"{CONFIG}.mode={TUNED}",), {"mode": TUNED}),
        (
            (f"{CONFIG}.recompile_limit", "16", f"{CONFIG}.infer_regions=false", f"{CONFIG}.on_failure", "raise"),
            {"recompile_limit": 16, "infer_regions": False, "on_failure": "raise"},
        ),
        ((f"{CONFIG}.backend", "package.module:callable"), {"backend": "package.module:callable"}),
        # Given more than once: key by key, the later one last, a dotted one behind all JSON.
        (
            (
                f"{CONFIG}.mode",
                TUNED,
                CONFIG,
                '{"mode": "default", "on_failure": "raise"}',
                CONFIG,
                '{"backend": "auto"}',
            ),
            {"mode": TUNED, "on_failure": "raise", "backend": "auto"},
        ),
        (("--diffusion_compile_config.mode", TUNED), {"mode": TUNED}),
    ],
)
def test_the_mapping_is_given_as_json_or_key_by_key(
    parser: Any, flags: tuple[str, ...], value: dict[str, Any] | None
) -> None:
    args = parse(parser, *flags)
    assert args.diffusion_compile_config == value
    given = args.get_explicit_kwargs_dict()
    assert given.get("diffusion_compile_config", "not given") == ("not given" if value is None else value)


def test_the_mapping_may_stand_in_a_config_file(parser: Any, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(f"diffusion-compile-config:\n  mode: {TUNED}\n  on_failure: raise\n")
    args = parse(parser, "--config", str(file), f"{CONFIG}.mode", "default")
    assert args.diffusion_compile_config == {"mode": "default", "on_failure": "raise"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((CONFIG, '{"mode": "reduce-overhead"}'), f"{CONFIG}.mode is 'reduce-overhead', which uses CUDA graphs"),
        ((f"{CONFIG}.mode", "max-autotune"), f"{CONFIG}.mode is 'max-autotune', which uses CUDA graphs"),
        ((f"{CONFIG}.on-failure", "raise"), f"unknown key '{CONFIG}.on-failure'; did you mean 'on_failure'"),
        ((f"{CONFIG}.infer_regions", "no"), f"{CONFIG}.infer_regions is 'no' (str), expected true or false"),
        (
            (f"{CONFIG}.recompile_limit.x", "1"),
            f"{CONFIG}.recompile_limit is {{'x': 1}} (dict), expected a whole number",
        ),
        ((f"{CONFIG}.backend", "eager", CONFIG, f'{{"mode": "{TUNED}"}}'), "only inductor has modes"),
        ((CONFIG, "default"), "'default' is not JSON"),
        ((CONFIG, "[1]"), "'[1]' is no JSON object; expected a JSON object such as"),
        ((CONFIG, '{"mode": }'), "is not JSON"),
    ],
)
def test_a_wrong_mapping_is_a_usage_error_that_says_what_to_do(
    parser: Any, flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(parser, *flags)
    assert stopped.value.code == 2
    assert f"argument {CONFIG}: " in (printed := capsys.readouterr().err)
    assert message in printed


def test_its_neighbours_still_work(parser: Any) -> None:
    args = parse(parser, "--diffusion-compile-granularity", "full", "--no-diffusion-compile-dynamic", FLAG)
    given = args.get_explicit_kwargs_dict()
    assert given["diffusion_compile_granularity"] == "full"
    assert given["diffusion_compile_dynamic"] is False
    assert given["diffusion_compile_vae"] is True


@pytest.mark.parametrize(
    "flags",
    [
        (f"{FLAG}=maybe",),
        ("--diffusion-compile-granularity", "half"),
        ("--diffusion-compile-vea",),
        ("--diffusion-compile-cofnig",),
        ("--no-diffusion-compile-granularity",),
    ],
)
def test_bad_values_are_a_usage_error_that_names_the_flag(
    parser: Any, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(parser, *flags)
    assert stopped.value.code == 2
    assert flags[0].partition("=")[0] in capsys.readouterr().err


def test_the_help_shows_the_flags(parser: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(parser, "--help=all")
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    neighbours = ("--diffusion-compile-granularity", "--diffusion-compile-dynamic")
    for flag in (FLAG, "--no-diffusion-compile-vae", f"{CONFIG} JSON", *neighbours):
        assert flag in text
    assert """'{"on_failure":"raise"}'""" in text


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What our adapter of the command line warns of."""
    texts: list[str] = []
    monkeypatch.setattr(cli.logger, "warning", lambda text, *args: texts.append(text % args))
    return texts


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--compilation-config", '{"mode": 3}'), "--compilation-config"),
        (("-O2",), "--optimization-level (-O)"),
        (("-O", "1"), "--optimization-level (-O)"),
        (("-cc.mode=3",), "--compilation-config"),
        ((), None),
    ],
)
def test_flags_without_effect_on_diffusion_stages_are_named(
    parser: Any, flags: tuple[str, ...], named: str | None, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_omni.diffusion.utils import hf_utils
    from vllm_omni.entrypoints.cli.serve import OmniServeCommand

    monkeypatch.setattr(hf_utils, "is_diffusion_model", lambda *_, **__: True)
    OmniServeCommand().validate(parse(parser, *flags))
    assert len(warnings) == (named is not None)
    assert all(named is not None and named in text for text in warnings)


@pytest.mark.parametrize(
    ("flags", "timeouts"),
    [
        ((), (1800, 1800)),
        (("--stage-init-timeout", "60"), (60, 1800)),
        (("--init-timeout", "7200"), (1800, 7200)),
        (("--enforce-eager",), (300, 600)),
        (("--no-diffusion-compile-vae",), (300, 600)),
        (("--no-diffusion-compile-vae", f"{CONFIG}.warmup.shapes", "64x64"), (1800, 1800)),
        ((f"{CONFIG}.warmup.budget_s", "3000"), (3600, 3600)),
    ],
)
def test_the_start_up_time_outs_leave_room_for_compiling(
    parser: Any, flags: tuple[str, ...], timeouts: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_omni.diffusion.utils import hf_utils
    from vllm_omni.entrypoints.cli.serve import OmniServeCommand

    monkeypatch.setattr(hf_utils, "is_diffusion_model", lambda *_, **__: True)
    args = parse(parser, *flags)
    OmniServeCommand().validate(args)
    assert (args.stage_init_timeout, args.init_timeout) == timeouts
    # What is not handed on explicitly, the engine takes from its own defaults.
    given = args.get_explicit_kwargs_dict()
    assert [given.get("stage_init_timeout", 300), given.get("init_timeout", 600)] == list(timeouts)


@pytest.mark.parametrize(
    ("given", "handed_on", "named"),
    [
        ({}, {"stage_init_timeout": 1800, "init_timeout": 1800}, []),
        ({"init_timeout": 7200}, {"stage_init_timeout": 1800, "init_timeout": 7200}, []),
        ({"enforce_eager": True}, {"enforce_eager": True}, []),
        (
            {"stage_init_timeout": 60, "diffusion_compile_config": {"warmup": {"shapes": ["64x64"], "budget_s": 3000}}},
            {"stage_init_timeout": 60, "init_timeout": 3600},
            ["warmup.budget_s is 3000 and stage_init_timeout is 60"],
        ),
    ],
)
def test_a_program_that_uses_omni_has_time_to_compile_and_is_told_what_leaves_none(
    given: dict[str, Any], handed_on: dict[str, Any], named: list[str], warnings: list[str]
) -> None:
    from vllm_omni.entrypoints.omni import Omni

    seen: dict[str, Any] = {}
    start = cli.give_omni_time_to_compile(lambda self, model, **kwargs: seen.update(kwargs))
    start(object(), "MODEL", **given)
    assert seen == given | handed_on
    assert len(warnings) == len(named)
    assert all(part in text for part, text in zip(named, warnings, strict=True))
    # And it is this that a program calls.
    assert inspect.unwrap(Omni.__init__) is not Omni.__init__


@pytest.mark.parametrize(
    "case", [(source, budget_s) for source in ("flag", "deploy YAML", "stage override") for budget_s in (59, 120)]
)
def test_a_budget_that_the_host_will_not_wait_for_is_named_before_anything_is_loaded(
    parser: Any, case: tuple[str, int], tmp_path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_omni.diffusion.utils import hf_utils
    from vllm_omni.entrypoints.cli.serve import OmniServeCommand

    monkeypatch.setattr(hf_utils, "is_diffusion_model", lambda *_, **__: True)
    source, budget_s = case
    mapping = {"warmup": {"budget_s": budget_s, "shapes": ["64x64"]}}
    deploy = tmp_path / "deploy.yaml"
    deploy.write_text(yaml.safe_dump({"stages": [{"stage_id": 0, "diffusion_compile_config": mapping}]}))
    flags = {
        "flag": (CONFIG, json.dumps(mapping)),
        "deploy YAML": ("--deploy-config", str(deploy)),
        "stage override": ("--stage-overrides", json.dumps({"0": {"diffusion_compile_config": mapping}})),
    }[source]
    OmniServeCommand().validate(parse(parser, "--stage-init-timeout", "60", *flags))
    assert len(warnings) == (budget_s > 60)
    assert all("warmup.budget_s is 120 and --stage-init-timeout is 60" in text for text in warnings)


def test_a_language_model_server_is_not_told_anything(warnings: list[str]) -> None:
    args = SimpleNamespace(explicit_keys={"compilation_config"}, omni=False)
    cli.name_flags_without_effect(lambda *_: None)(None, args)
    assert warnings == []
