"""require_evidence on the installed release: refused before anything is loaded, or let through."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.worker.diffusion_model_runner import DiffusionModelRunner

from tests.unit.evidence.rows import PROVENANCE, validated
from vllm_omni_diffusion_compile.errors import EvidenceError, SettingError
from vllm_omni_diffusion_compile.evidence import Row, revision, versions, write_rows
from vllm_omni_diffusion_compile.upstream.combination import known_at_start
from vllm_omni_diffusion_compile.upstream.observe import EXTENSION
from vllm_omni_diffusion_compile.upstream.required import refuse_without_evidence

pytestmark = pytest.mark.contract


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint without weights: whoever tries to load it fails."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "Flux2KleinPipeline"}))
    return folder


def _config(checkpoint: Path, **settings: Any) -> OmniDiffusionConfig:
    return OmniDiffusionConfig.from_kwargs(model=str(checkpoint), model_class_name="Flux2KleinPipeline", **settings)


def _row(checkpoint: Path, **settings: Any) -> Row:
    """The row that `qualify` would write for a configuration."""
    row = validated(**known_at_start(_config(checkpoint, **settings)))
    provenance = PROVENANCE | versions() | {"checkpoint_revision": revision(checkpoint)}
    return Row.model_validate(row.model_dump() | {"provenance": provenance | {"request_sha256": _sha(row)}})


def _sha(row: Row) -> str:
    assert row.provenance is not None
    return row.provenance.request_sha256


def _start(config: OmniDiffusionConfig) -> bool:
    """Load a model as the runner does; says whether anything was loaded."""
    loaded = []
    refuse_without_evidence(lambda self, **_: loaded.append(self))(SimpleNamespace(od_config=config))
    return bool(loaded)


def test_what_was_qualified_starts_and_the_log_names_the_row(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_rows(tmp_path / "rows.jsonl", [_row(checkpoint)])
    required = {"require_evidence": str(tmp_path / "rows.jsonl")}
    with caplog.at_level(logging.INFO):
        assert _start(_config(checkpoint, diffusion_compile_config=required))
    assert f"diffusion_compile_config.require_evidence: validated by {tmp_path}/rows.jsonl#klein" in caplog.text


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"diffusion_compile_granularity": "full"}, "compile_scope ('full' here, 'regional' in the row)"),
        ({"diffusion_compile_dynamic": False}, "dynamic (False here, True in the row)"),
        ({"diffusion_compile_vae": False}, "vae_policy ('off' here, 'measure' in the row)"),
        ({"enforce_eager": True}, "compile_scope ('eager' here"),
        ({"dtype": "float32"}, "dtype ('float32' here, 'bfloat16' in the row)"),
        ({"cache_backend": "tea_cache"}, "cache_policy ('tea_cache"),
        ({"enable_layerwise_offload": True}, "offload ('layerwise' here, 'none' in the row)"),
        ({"max_num_seqs": 2}, "capacity (2 here, 1 in the row)"),
        ({"parallel_config": {"ulysses_degree": 2}}, "topology ('2 devices: ulysses 2' here, '1 device' in the row)"),
        (
            {
                "diffusion_attention_config": {
                    "default": {"backend": "RAINFUSION_ATTN", "block_sparse": {"sparsity": 0.5}}
                }
            },
            "sparsity 0.5' here",
        ),
        (
            {"diffusion_compile_config": {"mode": "max-autotune-no-cudagraphs"}},
            "compiler ('inductor max-autotune-no-cudagraphs' here",
        ),
        ({"diffusion_compile_config": {"pad_seq_buckets": [640]}}, "bucket (640 here, None in the row)"),
    ],
)
def test_what_was_not_is_refused_and_what_would_qualify_it_is_said(
    checkpoint: Path, tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    write_rows(tmp_path / "rows.jsonl", [_row(checkpoint)])
    config = settings.get("diffusion_compile_config", {}) | {"require_evidence": str(tmp_path)}
    with pytest.raises(EvidenceError) as error:
        _start(_config(checkpoint, **settings | {"diffusion_compile_config": config}))
    assert said in str(error.value)
    assert f"vllm-omni-compile qualify --model {checkpoint} --id NAME --settings" in str(error.value)


FP8: dict[str, Any] = {"method": "fp8", "ignored_layers": ["proj_out"]}


def test_quantization_is_the_same_with_the_same_options_only(checkpoint: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [_row(checkpoint, quantization_config=FP8)])
    required = {"require_evidence": str(tmp_path)}
    assert _start(_config(checkpoint, quantization_config=FP8, diffusion_compile_config=required))
    for other in ({"ignored_layers": ["proj_in"]}, {"activation_scheme": "static"}):
        with pytest.raises(
            EvidenceError, match=r"differs in quantization \('fp8 \w{8}' here, 'fp8 \w{8}' in the row\)"
        ):
            _start(_config(checkpoint, quantization_config=FP8 | other, diffusion_compile_config=required))


def test_what_loading_writes_into_the_quantization_does_not_make_it_another(checkpoint: Path) -> None:
    # As qualify starts it: it is asked of a worker that is watched.
    config = _config(checkpoint, quantization_config=FP8, worker_extension_cls=EXTENSION)
    before = known_at_start(config)

    def load(self: Any) -> None:
        self.od_config.quantization_config.use_deep_gemm = True
        self.od_config.quantization_config.ignored_layers = ["renamed.proj_out"]

    refuse_without_evidence(load)(SimpleNamespace(od_config=config))
    assert known_at_start(config) == before


def test_another_checkpoint_is_another_combination(checkpoint: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [_row(checkpoint)])
    (checkpoint / "weights.safetensors").write_bytes(b"others")
    with pytest.raises(EvidenceError, match="checkpoint_revision"):
        _start(_config(checkpoint, diffusion_compile_config={"require_evidence": str(tmp_path / "rows.jsonl")}))


def test_the_runner_of_the_release_refuses_before_it_loads(checkpoint: Path, tmp_path: Path) -> None:
    runner = object.__new__(DiffusionModelRunner)
    runner.od_config = _config(checkpoint, diffusion_compile_config={"require_evidence": str(tmp_path / "none.jsonl")})
    with pytest.raises(EvidenceError, match=r"require_evidence: .*none\.jsonl cannot be read"):
        runner.load_model()


def test_without_the_option_nothing_is_looked_for(checkpoint: Path) -> None:
    assert _start(_config(checkpoint))


def test_an_empty_path_is_no_path(checkpoint: Path) -> None:
    with pytest.raises(SettingError, match="require_evidence"):
        _config(checkpoint, diffusion_compile_config={"require_evidence": ""})
