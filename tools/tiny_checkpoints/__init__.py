"""Checkpoints with random weights, a few megabytes each, that a released vLLM-Omni serves on a CPU within seconds."""
