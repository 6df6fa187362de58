"""Registration in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.contract


def python(code: str, *argv: str) -> str:
    """Run code in a fresh interpreter that has to exit with 0; return stdout and stderr together."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *argv],
        # Tests that ran before may have switched the hub off, and then a model has to be there.
        env={name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_process_without_omni_pays_nothing() -> None:
    python(
        """
        import sys
        from vllm_omni_diffusion_compile.plugin import register
        register(); register()
        heavy = {"torch", "vllm", "vllm_omni", "pydantic", "vllm_omni_diffusion_compile.upstream"} & set(sys.modules)
        assert not heavy, heavy
        """
    )


def test_registration_imports_no_module_of_the_host_that_was_not_there() -> None:
    python(
        """
        import sys
        import vllm_omni, vllm.logger
        before = {name for name in sys.modules if name.split(".")[0] in ("vllm", "vllm_omni", "torch")}
        from vllm_omni_diffusion_compile.plugin import register
        register()
        new = {name for name in sys.modules if name.split(".")[0] in ("vllm", "vllm_omni", "torch")} - before
        assert not new, new
        from vllm_omni_diffusion_compile.upstream import activation
        assert {outcome.state for outcome in activation.outcomes} <= {"applied", "present", "not in this release"}
        assert any(outcome.state == "applied" for outcome in activation.outcomes)
        """
    )


def test_registered_first_and_registered_late_end_alike() -> None:
    code = """
        import sys
        late = sys.argv[1] == "late"
        from vllm_omni_diffusion_compile.plugin import register
        if not late:
            register()
        import vllm.engine.arg_utils, vllm_omni.diffusion.worker.diffusion_worker, vllm_omni.diffusion.diffusion_engine
        import vllm_omni.entrypoints.cli.serve, vllm_omni.config.config_factory, vllm_omni.engine.async_omni_engine
        import vllm_omni.diffusion.inline_stage_diffusion_client, vllm_omni.diffusion.stage_diffusion_client
        import vllm_omni.metrics.prometheus, vllm_omni.diffusion.models.minimax_h3.pipeline_minimax_h3
        import vllm_omni.entrypoints.async_omni, vllm_omni.entrypoints.omni
        import vllm_omni.entrypoints.openai.serving_video, vllm_omni.entrypoints.openai.serving_chat
        import vllm_omni.diffusion.attention.backends.rainfusion_attn
        import vllm_omni.diffusion.executor.uniproc_executor
        from vllm_omni_diffusion_compile.upstream.ledger import GRAFTS
        def snapshot():
            "Every attribute of everything that a graft touches, by identity."
            found = {}
            for graft in GRAFTS:
                module = sys.modules.get(graft.module)
                if module is not None:
                    owner, name = graft.locate(module)
                    if isinstance(owner, type):
                        found |= {(owner, key): id(value) for key, value in vars(owner).items()}
                    elif name in vars(owner):
                        found[owner, name] = id(vars(owner)[name])
            return found
        before = snapshot()
        if late:
            register()
        from vllm_omni_diffusion_compile.upstream import activation
        done = {outcome.graft.target for outcome in activation.outcomes if outcome.state in ("applied", "present")}
        assert len(activation.outcomes) == len(GRAFTS), (len(activation.outcomes), len(GRAFTS))
        print("DONE", sorted(done))
        grafted = snapshot()
        activation.deactivate()
        if late:
            assert snapshot() == before
        else:
            from vllm_omni.diffusion.data import OmniDiffusionConfig
            assert "diffusion_compile_vae" not in OmniDiffusionConfig.__dataclass_fields__
        register()
        assert snapshot().keys() == grafted.keys()
        """
    first, late = (
        next(line for line in python(code, when).splitlines() if line.startswith("DONE")) for when in ("first", "late")
    )
    assert first == late


def test_another_plugins_wrapper_is_named_in_the_log_and_called(tmp_path: Path) -> None:
    (tmp_path / "other_plugin.py").write_text(
        textwrap.dedent(
            """
            import functools
            def wrap(original):
                @functools.wraps(original)
                def load_model(self, *args, **kwargs):
                    print("OTHER CALLED")
                    return original(self, *args, **kwargs)
                return load_model
            """
        )
    )
    output = python(
        """
        import sys
        from types import SimpleNamespace
        sys.path.insert(0, sys.argv[1])
        from vllm_omni.diffusion.worker.diffusion_model_runner import DiffusionModelRunner
        import other_plugin
        DiffusionModelRunner.load_model = other_plugin.wrap(DiffusionModelRunner.load_model)
        from vllm_omni_diffusion_compile.plugin import register
        register()
        runner = object.__new__(DiffusionModelRunner)
        runner.pipeline, runner.od_config = None, SimpleNamespace(enforce_eager=True)
        runner.load_model(load_format="dummy")
        """,
        str(tmp_path),
    )
    assert "DiffusionModelRunner.load_model was already wrapped by other_plugin" in output
    assert "OTHER CALLED" in output


def test_a_release_with_the_capability_is_left_to_itself() -> None:
    output = python(
        """
        import inspect, sys
        import vllm_omni.diffusion.data as data, vllm_omni.diffusion.compile as compile_module
        import vllm_omni.diffusion.worker.diffusion_model_runner as runner
        from vllm_omni.diffusion.diffusion_engine import DiffusionEngine
        from vllm_omni.diffusion.worker.diffusion_model_runner import DiffusionModelRunner
        # What the upstream change brings, as far as our probes can see it.
        fields = data.OmniDiffusionConfig.__dataclass_fields__
        fields["diffusion_compile_vae"] = fields["enforce_eager"]
        native = lambda *args, **kwargs: "native"
        compile_module.compile_callable_with_fallback = runner.compile_callable_with_fallback = native
        DiffusionModelRunner._compile_vae_decodes = native
        def methods():
            # Declared shapes are warmed, events are reported and artifacts are kept, whatever compiles: wrappers over
            # the release's own.
            warmup = inspect.unwrap(DiffusionEngine.run_startup_warmup)
            return inspect.unwrap(DiffusionModelRunner.load_model), DiffusionEngine._dummy_run, warmup
        kept = methods()
        from vllm_omni_diffusion_compile.plugin import register
        register()
        assert kept == methods()
        assert compile_module.compile_callable_with_fallback is native
        assert DiffusionModelRunner._compile_vae_decodes is native
        """
    )
    assert "DiffusionModelRunner.load_model: this release has it natively; ours steps aside" in output


def test_a_graft_that_cannot_hold_is_refused_and_its_module_left_whole() -> None:
    python(
        """
        import vllm_omni.diffusion.diffusion_engine as engine
        dummy_run = engine.DiffusionEngine._dummy_run
        def run_startup_warmup(engine, sizes):
            return None
        engine.DiffusionEngine.run_startup_warmup = run_startup_warmup
        from vllm_omni_diffusion_compile.errors import GraftError
        from vllm_omni_diffusion_compile.plugin import register
        for _ in range(2):
            try:
                register()
            except GraftError as error:
                text = str(error)
            else:
                raise AssertionError("not refused")
        assert "DiffusionEngine.run_startup_warmup" in text, text
        assert "('self',)" in text and "('engine', 'sizes')" in text, text
        assert engine.DiffusionEngine._dummy_run is dummy_run
        from vllm_omni.diffusion.data import OmniDiffusionConfig
        assert "diffusion_compile_vae" not in OmniDiffusionConfig.__dataclass_fields__
        """
    )


def test_a_release_outside_of_the_tested_range_is_reported_once() -> None:
    output = python(
        """
        import vllm_omni
        from vllm_omni_diffusion_compile.upstream import activation
        activation.TESTED_RELEASES = ">=0.1,<0.2"
        from vllm_omni_diffusion_compile.plugin import register
        register(); register()
        """
    )
    assert output.count("is outside of the range") == 1


def test_offline_needs_one_import() -> None:
    python(
        """
        import vllm_omni_diffusion_compile.offline
        from vllm_omni.diffusion.data import OmniDiffusionConfig
        assert OmniDiffusionConfig(model="tiny", diffusion_compile_vae=False).diffusion_compile_vae is False
        """
    )
