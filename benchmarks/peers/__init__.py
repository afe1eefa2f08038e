"""The systems that `benchmarks/engine.py` compares, one module each, and what drives them.

    engine.py ── Worker ── one JSON line per job and answer ──> python -m peers.NAME, in its own environment

Runs in a peer's environment: protocol, streams, and the modules named for the peers. Nothing else may be
imported there: they have neither Tandem's packages nor each other's. Runs in the driver: lineup (who takes
part), environments (virtual environments made on demand), worker (a peer's process), prompts, statistics,
report.
"""
