"""Checks that `make lint` runs, each as `python -m tools.pre_commit.NAME` from the root of the checkout."""
