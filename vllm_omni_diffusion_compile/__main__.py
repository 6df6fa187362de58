"""`python -m vllm_omni_diffusion_compile` is `vllm-omni-compile`."""

import sys

from vllm_omni_diffusion_compile.commands.main import main

sys.exit(main())
