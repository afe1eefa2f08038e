"""The live page of one gateway: its last half hour, second by second.

    requests end ──> ended.py ──┐
    metrics, admission, fleet ──┴─ each second ──> sampler.py ──> history.py ──> routes.py ──> readers

Readers are the page (static/) and `tandem top`.

Samples take their counts from the gateway's metrics. Counts are totals since the gateway's start, so the
difference of two samples gives the numbers of the time between them. Samples hold no texts and no token ids.
"""
