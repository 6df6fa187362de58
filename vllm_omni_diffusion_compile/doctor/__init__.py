"""Checks of a machine and an installation, without vLLM-Omni.

A check looks and changes nothing. It returns findings: facts with a state and, where something is wrong, the remedy.
What only the installed vLLM-Omni can answer is in `upstream/inspection`, in the same form.
"""

from vllm_omni_diffusion_compile.doctor.finding import Finding, State, exit_status

__all__ = ["Finding", "State", "exit_status"]
