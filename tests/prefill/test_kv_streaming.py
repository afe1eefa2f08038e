"""Progress of a prefill pod's engine, as its heartbeats report it."""

from __future__ import annotations

from kv_groups import kv_group
from tandem_engine.batch import Batch
from tandem_engine.block_manager import BlockGroup, BlockManager
from tandem_prefill.kv_streaming import KVStreamer


def test_layers_count_of_every_request() -> None:
    streamer = KVStreamer(BlockManager([BlockGroup(4)], 16), [kv_group(range(2), 1, 8)])
    for layer in (0, 1, 0):
        streamer.on_layer_done(Batch(sequences=()), layer)
    assert streamer.num_computed_layers == 3
    assert streamer.num_open == 0
