"""For people who change the drafter: the drafters of `benchmarks/replay.py`, and speculation_price.py."""
