"""`vllm-omni-compile doctor` with the installed release: broken set-ups, each named with what to do."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vllm_omni_diffusion_compile.commands.main import main
from vllm_omni_diffusion_compile.doctor import toolchain
from vllm_omni_diffusion_compile.upstream.inspection.plugins import check_plugins

pytestmark = pytest.mark.contract

CONFIG = "--diffusion-compile-config"
ATTENTION = "--diffusion-attention-config.default.backend"
Document = dict[str, Any]
Doctor = Callable[..., tuple[int, Document]]


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """Runs it in this process, which has the host imported and grafted; returns exit status and document."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "vllm"))

    def run(*arguments: str) -> tuple[int, Document]:
        status = main(["doctor", "--json", *arguments])
        return status, json.loads(capsys.readouterr().out)

    return run


def section(document: Document, title: str) -> list[dict[str, Any]]:
    return [finding for each in document["sections"] if each["title"] == title for finding in each["findings"]]


def named(document: Document, title: str, name: str) -> dict[str, Any]:
    """The worst finding of a name."""
    order = ["broken", "limit", "unknown", "ok"]
    found = [finding for finding in section(document, title) if finding["name"].endswith(name)]
    return min(found, key=lambda finding: order.index(finding["state"]))


def process(path: Path, *arguments: str, **environment: str) -> tuple[int, Document]:
    """Run it in a process of its own, with a folder ahead of everything that is installed."""
    done = subprocess.run(
        [sys.executable, "-m", "vllm_omni_diffusion_compile", "doctor", "--json", *arguments],
        env=os.environ | {"PYTHONPATH": f"{path}:{os.environ.get('PYTHONPATH', '')}", **environment},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def pretend(folder: Path, release: str) -> Path:
    """Have the metadata of vLLM-Omni name another release."""
    info = folder / f"vllm_omni-{release}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm-omni\nVersion: {release}\n")
    return folder


def test_a_set_up_in_order_exits_with_0(doctor: Doctor, generic_model: str) -> None:
    status, document = doctor("--", "vllm", "serve", generic_model, "--omni")
    states = {finding["state"] for each in document["sections"] for finding in each["findings"]}
    assert (status, states) == (0, {"ok"})
    titles = [each["title"] for each in document["sections"]]
    assert titles == [
        *("versions", "plugins", "grafts", "settings", "components", "platform", "attention", "compiler"),
        "compile cache",
    ]
    assert named(document, "components", "._dit_modules")["found"] == "'transformer' is there"
    assert named(document, "attention", "RAINFUSION_ATTN")["found"] == "can be selected"


def test_who_compiles_nothing_needs_no_compiler(
    doctor: Doctor, generic_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "why_not", lambda compiler: "fatal error: omp.h: No such file")
    line = ("--", "vllm", "serve", generic_model, "--omni")
    status, document = doctor(*line)
    assert (status, named(document, "compiler", "C++ compiler")["state"]) == (1, "limit")
    status, document = doctor(*line, "--enforce-eager")
    assert status == 0
    assert "not needed" in named(document, "compiler", "compiler")["found"]


def test_a_release_that_is_too_old_is_named_with_each_graft_that_does_not_hold(
    tmp_path: Path, release: tuple[int, int]
) -> None:
    # What is checked is the installed code; only its number is older, and with it the rows of the ledger that apply:
    # those for 0.28.0 hold on it, and not on 0.30.0.
    status, document = process(pretend(tmp_path, "0.27.0"))
    holds = release < (0, 30)
    assert status == (1 if holds else 2)
    version = named(document, "versions", "vllm-omni")
    assert "0.27.0, too old" in version["found"] and "install vLLM-Omni >=0.28.0" in version["remedy"]
    grafts = section(document, "grafts")
    refused = [finding for finding in grafts if finding["state"] == "broken"]
    assert (not refused) == holds and len(refused) < len(grafts)
    for finding in refused:
        assert finding["found"].startswith("refused: expected ") and ", found " in finding["found"]
        assert "install a vLLM-Omni release" in finding["remedy"]


def test_a_release_that_is_too_new_is_named(doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(pretend(tmp_path, "0.99.0"))
    status, document = doctor()
    assert status == 1
    version = named(document, "versions", "vllm-omni")
    assert version["state"] == "limit"
    assert "0.99.0, too new" in version["found"] and "that was tested with 0.99.0" in version["remedy"]
    assert "install vLLM 0.99" in named(document, "versions", "vllm")["remedy"]


def test_a_plugin_that_is_filtered_out_is_named(
    doctor: Doctor, generic_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "vllm_omni_register_models,diffusion_cpu")
    status, document = doctor("--", "vllm", "serve", generic_model, "--omni")
    assert status == 2
    plugin = named(document, "plugins", "diffusion_compile")
    assert plugin["state"] == "broken" and "filtered out" in plugin["found"]
    assert plugin["remedy"].startswith("VLLM_PLUGINS=diffusion_compile,diffusion_cpu,vllm_omni_register_models")
    assert "none is applied" in named(document, "grafts", "grafts")["found"]


def test_the_plugins_that_are_printed_are_all_that_a_server_needs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    # By itself: vLLM-Omni settles for a platform once a process, and without its plugin there is none on CPU.
    monkeypatch.setenv("VLLM_PLUGINS", "lora_filesystem_resolver")
    printed = {finding.name: finding.remedy for finding in check_plugins(accelerator=False)}["diffusion_compile"]
    assert printed.startswith(
        "VLLM_PLUGINS=diffusion_compile,diffusion_cpu,lora_filesystem_resolver,vllm_omni_register_models, or unset it"
    )
    on_gpu = {finding.name: finding.remedy for finding in check_plugins(accelerator=True)}["diffusion_compile"]
    assert "diffusion_cpu" not in on_gpu


OTHER_PLUGIN = """
import functools

def register():
    from vllm_omni.diffusion.worker.diffusion_model_runner import DiffusionModelRunner
    original = DiffusionModelRunner.load_model

    @functools.wraps(original)
    def load_model(self, *args, **kwargs):
        return original(self, *args, **kwargs)

    DiffusionModelRunner.load_model = load_model
"""


def test_another_plugin_that_wraps_first_is_named(tmp_path: Path) -> None:
    (tmp_path / "other_plugin.py").write_text(OTHER_PLUGIN)
    info = tmp_path / "other_plugin-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-plugin\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nother = other_plugin:register\n")
    status, document = process(tmp_path)
    assert status == 1
    assert "other" in named(document, "plugins", "other general plugins")["found"].split(", ")
    composed = [finding for finding in section(document, "grafts") if finding["state"] == "limit"]
    assert {finding["name"].rpartition(":")[2] for finding in composed} == {"DiffusionModelRunner.load_model"}
    assert composed[0]["found"] == "composed with other_plugin: ours calls theirs"
    assert "other_plugin left out of VLLM_PLUGINS" in composed[0]["remedy"]


@pytest.mark.parametrize(
    ("decorated", "found", "remedy"),
    [
        (True, "applied, then wrapped by late_plugin, which calls ours", "left out of VLLM_PLUGINS"),
        (False, "applied, then wrapped by late_plugin, and ours is not seen behind it", "leave late_plugin out"),
    ],
)
def test_another_plugin_that_comes_after_us_is_named(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, decorated: bool, found: str, remedy: str
) -> None:
    from vllm_omni.diffusion.diffusion_engine import DiffusionEngine

    plugin = ModuleType("late_plugin")
    code = "def _dummy_run(self):\n    return original(self)\n"
    plugin.__dict__["original"] = original = DiffusionEngine._dummy_run
    exec(textwrap.dedent(code), plugin.__dict__)
    theirs = functools.wraps(original)(plugin._dummy_run) if decorated else plugin._dummy_run
    monkeypatch.setattr(DiffusionEngine, "_dummy_run", theirs)
    status, document = doctor()
    assert status == 1
    finding = named(document, "grafts", "DiffusionEngine._dummy_run")
    assert finding["found"] == found and remedy in finding["remedy"]


def test_the_cache_of_the_command_line_is_the_one_that_is_checked(
    doctor: Doctor, generic_model: str, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    line = ("vllm", "serve", generic_model, "--omni", f"{CONFIG}.cache_dir", str(cache))
    for mode, status, said in ((0o777, 1, f"chmod go-w {cache}"), (0o755, 0, "only its owner can write it")):
        cache.chmod(mode)
        exit_status, document = doctor("--", *line)
        finding = named(document, "compile cache", "cache directory")
        assert exit_status == status
        assert str(cache) in finding["found"] and said in finding["found"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ("--diffusion-compile-granularity", "full", "--enable-layerwise-offload"),
            "'full' is incompatible with layerwise offload; use 'regional' compilation instead",
        ),
        (
            (f"{CONFIG}.mode", "max-autotune-no-cudagraphs", f"{CONFIG}.backend", "eager"),
            "mode is 'max-autotune-no-cudagraphs' and backend is 'eager', but only inductor has modes",
        ),
        ((f"{CONFIG}.on-failure", "raise"), "did you mean 'on_failure'?"),
        (("--stage-overrides", '{"0": {"diffusion_compile_vea": false}}'), "did you mean 'diffusion_compile_vae'?"),
    ],
)
def test_contradictory_flags_are_refused_in_the_words_of_the_server(
    doctor: Doctor, generic_model: str, flags: tuple[str, ...], said: str
) -> None:
    status, document = doctor("--", "vllm", "serve", generic_model, "--omni", *flags)
    assert status == 2
    finding = named(document, "settings", "command line")
    assert finding["state"] == "broken" and said in finding["found"]
    assert "correct it" in finding["remedy"]


def test_a_line_without_omni_is_named(doctor: Doctor, generic_model: str) -> None:
    status, document = doctor("--", "vllm", "serve", generic_model)
    assert status == 2
    finding = named(document, "settings", "command line")
    assert "no --omni" in finding["found"] and finding["remedy"] == "add --omni"


def test_a_yaml_that_the_host_ignores_is_named(doctor: Doctor, generic_model: str, tmp_path: Path) -> None:
    deploy = tmp_path / "deploy.yaml"
    deploy.write_text(
        "dtype: float32\nstages:\n- stage_id: 0\n  diffusion_compile_vae: false\n  vae_use_tiling: true\n"
    )
    status, document = doctor("--config", str(deploy), "--", "vllm", "serve", generic_model, "--omni")
    assert status == 1
    finding = named(document, "settings", "command line")
    assert "have no effect: dtype, stages[0].vae_use_tiling" in finding["found"]
    assert "Give them on the command line" in finding["found"] and "do as it says" in finding["remedy"]
    # What this package takes from it has an effect, and is said to come from there.
    vae = named(document, "settings", "stages[0].diffusion_compile_vae")
    assert (vae["value"], vae["source"]) == (False, f"{deploy}: stages[0].diffusion_compile_vae")


def test_a_wrong_yaml_is_named_with_file_and_stage(generic_model: str, tmp_path: Path) -> None:
    """In a process that loads the host as a server does: its modules first, and the plugins after them."""
    deploy = tmp_path / "deploy.yaml"
    deploy.write_text("stages:\n- stage_id: 0\n  diffusion_compile_config: {warmup: {shape: [512x512]}}\n")
    serve = ("--", "vllm", "serve", generic_model, "--omni", "--deploy-config", str(deploy))
    status, document = process(tmp_path, *serve)
    assert status == 2
    said = named(document, "settings", "command line")["found"]
    assert said.startswith(f"{deploy}: stage 0: unknown key 'diffusion_compile_config.warmup.shape'")


def test_a_wrong_override_is_refused_in_our_words(doctor: Doctor, generic_model: str) -> None:
    overrides = json.dumps({"0": {"diffusion_compile_config": {"on_failur": "raise"}}})
    status, document = doctor("--", "vllm", "serve", generic_model, "--omni", "--stage-overrides", overrides)
    assert status == 2
    found = named(document, "settings", "command line")["found"]
    assert "unknown key" in found and "did you mean 'on_failure'" in found and "validation error" not in found


def test_what_a_server_warns_of_before_it_is_refused_is_told_too(doctor: Doctor, generic_model: str) -> None:
    wrong = ("--ulysses-degree", "64")
    status, document = doctor("--", "vllm", "serve", generic_model, "--omni", "--compilation-config.mode", "3", *wrong)
    assert status == 2
    warning, refusal = (each for each in section(document, "settings") if each["name"] == "command line")
    assert warning["state"] == "limit" and "reaches language-model stages only" in warning["found"]
    assert refusal["state"] == "broken" and "64" in refusal["found"]


def test_evidence_that_is_demanded_and_not_there_is_named(doctor: Doctor, generic_model: str, tmp_path: Path) -> None:
    rows = str(tmp_path / "rows.jsonl")
    status, document = doctor("--", "vllm", "serve", generic_model, "--omni", f"{CONFIG}.require_evidence", rows)
    assert status == 2
    finding = next(each for each in section(document, "settings") if each["name"] == "require_evidence")
    assert finding["state"] == "broken" and rows in finding["found"]


def test_warnings_of_the_server_are_findings(doctor: Doctor, generic_model: str) -> None:
    budget = (f"{CONFIG}.warmup.budget_s", "900", "--stage-init-timeout", "60")
    status, document = doctor("--", "vllm", "serve", generic_model, "--omni", *budget)
    assert status == 1
    assert "ends a start that takes that long" in named(document, "settings", "command line")["found"]


@pytest.mark.parametrize(
    ("executor", "backend", "state"),
    [("mindie", "RAINFUSION_ATTN", "broken"), ("mindie", "TORCH_SDPA", "limit"), ("flex", "RAINFUSION_ATTN", "ok")],
)
def test_missing_mindie_is_named_where_it_is_asked_for(
    doctor: Doctor, generic_model: str, executor: str, backend: str, state: str
) -> None:
    flags = (f"{CONFIG}.rainfusion_executor", executor, ATTENTION, backend)
    _, document = doctor("--", "vllm", "serve", generic_model, "--omni", *flags)
    finding = named(document, "attention", "RAINFUSION_ATTN executor")
    assert finding["state"] == state
    assert ("install MindIE-SD 3.1.0" in finding["found"]) == (state != "ok")
    assert named(document, "attention", backend)["found"] == "selected"


def test_an_attention_backend_that_does_not_run_here_is_named(doctor: Doctor, generic_model: str) -> None:
    status, document = doctor("--", "vllm", "serve", generic_model, "--omni", ATTENTION, "SAGE_ATTN")
    assert status == 2
    finding = named(document, "attention", "SAGE_ATTN")
    assert finding["state"] == "broken" and "does not run here" in finding["found"] and finding["remedy"]


def test_a_compiler_backend_that_is_not_there_is_named(doctor: Doctor, generic_model: str) -> None:
    status, document = doctor("--", "vllm", "serve", generic_model, "--omni", f"{CONFIG}.backend", "inductr")
    assert status == 2
    assert "did you mean 'inductor'?" in named(document, "settings", "backend")["found"]


def test_a_declared_component_that_is_not_there_is_named(
    doctor: Doctor, generic_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_omni.diffusion.models.flux2_klein.pipeline_flux2_klein import Flux2KleinPipeline

    monkeypatch.setattr(Flux2KleinPipeline, "_dit_modules", ["transformer", "transfromer_2"])
    status, document = doctor("--", "vllm", "serve", generic_model, "--omni")
    assert status == 1
    assert "'transfromer_2'" in named(document, "components", "Flux2KleinPipeline._dit_modules")["found"]


def test_every_setting_comes_with_the_surface_that_it_came_from(
    doctor: Doctor, generic_model: str, tmp_path: Path
) -> None:
    deploy = tmp_path / "deploy.yaml"
    deploy.write_text(
        "stages:\n- stage_id: 0\n  diffusion_compile_vae: true\n  diffusion_compile_dynamic: false\n"
        "  enforce_eager: false\n"
    )
    overrides = json.dumps({"0": {"diffusion_compile_granularity": "full"}})
    flags = (
        *("--deploy-config", str(deploy), "--stage-overrides", overrides, "--no-diffusion-compile-vae"),
        *(f"{CONFIG}.warmup.shapes", "64x64", f"{CONFIG}.on_failure", "raise"),
    )
    _, document = doctor("--", "vllm", "serve", generic_model, "--omni", *flags)
    found = {
        finding["name"]: (finding["value"], finding["source"])
        for finding in section(document, "settings")
        if "source" in finding
    }
    prefix = "stages[0].diffusion_compile_"
    assert found[f"{prefix}vae"] == (False, "--no-diffusion-compile-vae")
    assert found[f"{prefix}dynamic"] == (False, f"{deploy}: {prefix}dynamic")
    assert found[f"{prefix}granularity"] == ("full", '--stage-overrides["0"].diffusion_compile_granularity')
    assert found[f"{prefix}config.on_failure"] == ("raise", f"{CONFIG}.on_failure")
    assert found[f"{prefix}config.warmup.shapes"][1] == f"{CONFIG}.warmup.shapes"
    assert found[f"{prefix}config.backend"] == ("auto", "default")


def test_of_a_model_that_is_not_here_what_was_typed_is_checked(doctor: Doctor) -> None:
    line = ("vllm", "serve", "nobody/no-such-model", "--omni", "--no-diffusion-compile-vae")
    status, document = doctor("--", *line)
    assert status == 0
    assert "is not on this machine" in named(document, "settings", "model")["found"]
    assert named(document, "settings", "model")["state"] == "unknown"
    assert named(document, "settings", "diffusion_compile_vae")["source"] == "--no-diffusion-compile-vae"


def test_a_yaml_by_itself_is_checked_as_far_as_it_goes(doctor: Doctor, tmp_path: Path) -> None:
    deploy = tmp_path / "deploy.yaml"
    deploy.write_text("stages:\n- stage_id: 0\n  diffusion_compile_vae: false\n")
    status, document = doctor("--config", str(deploy))
    assert status == 0
    assert named(document, "settings", "deploy YAML")["state"] == "unknown"
    assert named(document, "settings", "diffusion_compile_vae")["value"] is False
    deploy.write_text("stages:\n- stage_id: 0\n  diffusion_compile_config: {mode: max-autotune}\n")
    status, document = doctor("--config", str(deploy))
    assert status == 2
    assert f"{deploy}: stage 0: " in named(document, "settings", "deploy YAML")["found"]


def test_people_get_a_table_with_the_remedy_below_what_is_wrong(
    generic_model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    line = ("--", "vllm", "serve", generic_model, "--omni", "--compilation-config.mode", "3")
    assert main(["doctor", *line]) == 1
    printed = capsys.readouterr().out
    assert "it will work, with a limit (exit status 1)" in printed
    warning, remedy = (text for text in printed.splitlines() if "reaches language-model" in text or "→" in text)
    assert warning.strip().startswith("limit") and "do as it says" in remedy


def test_what_is_no_serve_line_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--", "python", "server.py"]) == 2
    assert "expected: -- vllm serve MODEL --omni" in capsys.readouterr().err
    assert main(["doctor", "--config", "no-such.yaml"]) == 2
    assert "there is no such file" in capsys.readouterr().err
