"""What computes attention over the chosen blocks: one small interface, and who is behind it on which device."""

from vllm_omni_diffusion_compile.rainfusion.executors.choice import NAMES, find_executor
from vllm_omni_diffusion_compile.rainfusion.executors.interface import Executor

__all__ = ["NAMES", "Executor", "find_executor"]
