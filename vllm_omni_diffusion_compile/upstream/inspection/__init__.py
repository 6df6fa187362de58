"""What only the installed vLLM-Omni can answer of a set-up, as findings; importing this needs no host."""
