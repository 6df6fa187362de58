"""All model families of vLLM-Omni 0.30.0, by what they take as input."""

from __future__ import annotations

from tools.model_families.families import action, audio, counted, flux_like, image, language, video
from tools.model_families.family import Family, NotBuilt

FAMILIES: tuple[Family, ...] = tuple(
    sorted(
        (
            family
            for module in (action, audio, counted, flux_like, image, language, video)
            for family in module.FAMILIES
        ),
        key=lambda family: family.name,
    )
)

NOT_BUILT: tuple[NotBuilt, ...] = (
    NotBuilt(
        name="internvla_a1",
        reason="cannot be imported beside the transformers that the release is locked to: it imports "
        "check_model_inputs from transformers.models.qwen3_vl.modeling_qwen3_vl, which is not there",
    ),
    NotBuilt(
        name="cosyvoice3_audio",
        reason="has no pipeline: a language-model stage calls it, and the diffusion model runner never sees it "
        "(built for --parity only)",
    ),
    NotBuilt(name="dmd2", reason="no model of its own: a mixin that distilled pipelines of other families share"),
    NotBuilt(name="mistral_encoder", reason="no denoiser: an encoder that other families share"),
    NotBuilt(name="t5_encoder", reason="no denoiser: an encoder that other families share"),
    NotBuilt(name="schedulers", reason="no model: schedulers"),
)
