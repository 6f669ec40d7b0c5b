"""Measurements of springtide, each in a process of its own; `python -m benchmarks --list`."""
