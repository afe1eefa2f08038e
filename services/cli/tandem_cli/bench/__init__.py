"""Load generation against a running gateway: `tandem bench serve`."""


class BenchError(ValueError):
    """Invalid options, trace or dataset; the message is one sentence."""
