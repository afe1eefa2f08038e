"""Drafting without a model: what `benchmarks/replay.py` runs, imported by other drafting benchmarks too."""
