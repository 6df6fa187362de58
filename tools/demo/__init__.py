"""What this package does, on a model of 3 MB and without an accelerator: `make demo`."""
