"""`vllm-omni-compile`: what is asked and done outside of a server."""
