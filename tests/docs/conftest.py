"""The installed vLLM-Omni with our plugin registered, as in tests/contract."""

from vllm_omni_diffusion_compile.plugin import register

register()
