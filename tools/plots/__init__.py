"""Plots of the documentation, drawn from our own arithmetic."""
