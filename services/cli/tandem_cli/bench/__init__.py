"""Load generation against a running gateway: `tandem bench serve`."""


class BenchError(ValueError):
    """Options, a trace or a dataset do not describe a benchmark; one sentence."""
