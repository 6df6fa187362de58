"""The names of our settings."""

from __future__ import annotations

VAE = "diffusion_compile_vae"
CONFIG = "diffusion_compile_config"
# What vLLM-Omni does not have itself: these become fields of its configuration classes.
OWN = (VAE, CONFIG)
PREFIX = "diffusion_compile_"
# All of them, in the order in which they are documented.
NAMES = (f"{PREFIX}granularity", f"{PREFIX}dynamic", *OWN)
