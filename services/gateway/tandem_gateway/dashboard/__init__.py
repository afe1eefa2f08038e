"""The live page of one gateway: its last half hour, second by second.

    requests end ──> ended.py ──┐
    metrics, admission, fleet ──┴─ each second ──> sampler.py ──> history.py ──> routes.py ──> readers

Readers are the page (static/) and `tandem top`.

Nothing is counted here that the gateway counts elsewhere. A sample holds what has been counted since the
gateway's start, so that any two samples give the numbers of the time between them. There are no texts and
no token ids in them.
"""
