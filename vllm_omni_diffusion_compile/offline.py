"""Importing this module registers the plugin, for programs that use `Omni` without a server.

`vllm serve` loads plugins before it reads its command line. `Omni(...)` may resolve its configuration before any plugin
is loaded, so a program that passes our settings to it imports this first.
"""

from vllm_omni_diffusion_compile.plugin import register

register()
