"""Every model family of the installed vLLM-Omni, small, with random weights: what is compiled of it, and how well."""
