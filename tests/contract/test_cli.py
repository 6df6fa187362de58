"""The flags of `vllm serve --omni`, on the parser that the installed release builds."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_omni_diffusion_compile.upstream import cli

pytestmark = pytest.mark.contract
FLAG = "--diffusion-compile-vae"


@pytest.fixture(scope="module")
def parser() -> Any:
    """The parser as `vllm serve MODEL --omni` builds it; building it takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["vllm", "serve", "MODEL", "--omni"])
        from vllm_omni.entrypoints.cli.serve import OmniServeCommand
        from vllm_omni.utils.tracking_parser import TrackingArgumentParser

        root = TrackingArgumentParser()
        command = OmniServeCommand()
        command.subparser_init(root.add_subparsers(dest="subparser"))
        yield root


def parse(parser: Any, *flags: str) -> Any:
    return parser.parse_args(["serve", "MODEL", "--omni", *flags])


@pytest.mark.parametrize(("flags", "value"), [((), None), ((FLAG,), True), (("--no-diffusion-compile-vae",), False)])
def test_the_flag_says_yes_no_or_nothing(parser: Any, flags: tuple[str, ...], value: bool | None) -> None:
    args = parse(parser, *flags)
    assert args.diffusion_compile_vae is value
    # Only what the user typed is handed on; a default would win over the deploy YAML.
    assert ("diffusion_compile_vae" in args.get_explicit_kwargs_dict()) == (value is not None)


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


def test_the_help_shows_the_three_flags(parser: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(parser, "--help=all")
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for flag in (FLAG, "--no-diffusion-compile-vae", "--diffusion-compile-granularity", "--diffusion-compile-dynamic"):
        assert flag in text


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


def test_a_language_model_server_is_not_told_anything(warnings: list[str]) -> None:
    args = SimpleNamespace(explicit_keys={"compilation_config"}, omni=False)
    cli.name_flags_without_effect(lambda *_: None)(None, args)
    assert warnings == []
