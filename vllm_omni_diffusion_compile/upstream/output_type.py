"""What a model makes, as vLLM-Omni says it: `python -m vllm_omni_diffusion_compile.upstream.output_type MODEL`.

A program, so that a process which only starts servers does not import the host.
"""

from __future__ import annotations

import json
import sys


def output_type(model: str) -> dict[str, str | None]:
    """Return the class of a model's pipeline, and what it makes; None for what vLLM-Omni does not know."""
    from vllm_omni.diffusion.data import resolve_model_class_name
    from vllm_omni.diffusion.io_support import get_diffusion_output_type

    pipeline = resolve_model_class_name(model)
    return {"pipeline": pipeline, "makes": None if pipeline is None else get_diffusion_output_type(pipeline)}


if __name__ == "__main__":
    sys.stdout.write(f"{json.dumps(output_type(sys.argv[1]))}\n")
