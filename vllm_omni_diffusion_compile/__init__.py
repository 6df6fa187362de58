"""Compile settings, compiled VAE decode and a warmup through the real request path, for a released vLLM-Omni.

Nothing happens at import. vLLM loads `plugin.register` through its entry points; in a program that uses `Omni`
directly, `import vllm_omni_diffusion_compile.offline` before the first `Omni(...)` does the same.
"""

__version__ = "0.1.0"
