"""MiniMax-H3 packs a request into one sequence of rows: how many rows, and which lengths a server pads them to.

A video model with one sequence for everything has a shape for every prompt length. Buckets make a few of them.
"""
