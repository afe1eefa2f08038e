"""Streams KV to the decode pod while the prompt is computed.

After each layer of each chunk the completed blocks of that layer go to the KV sender. A chunk that ends
inside a block leaves that block to the next chunk, unless the prompt ends there. Blocks found in the prefix
cache are sent with the first chunk. The sender reads blocks later, on its own thread. A hold keeps them
allocated until the transfer ends, even if the request finishes or is preempted earlier, so no frame reads
reused memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem_engine.batch import Batch, ScheduledSequence
from tandem_engine.block_manager import BlockHold, BlockManager
from tandem_engine.transport.outgoing import OutgoingTransfer


@dataclass
class _Stream:
    """One request's transfer, as the engine's thread sees it."""

    transfer: OutgoingTransfer
    #: Per layer: logical blocks given to the sender so far.
    num_sent_blocks: list[int]
    holds: list[BlockHold] = field(default_factory=list)


class KVStreamer:
    """The engine's layer listener. Methods run on the engine's thread; counts may be read from any thread."""

    def __init__(self, manager: BlockManager, num_layers: int) -> None:
        self._manager = manager
        self._num_layers = num_layers
        #: Layers computed since the start, for any request; shows that the engine makes progress.
        self.num_computed_layers = 0
        self._streams: dict[str, _Stream] = {}

    def open(self, request_id: str, transfer: OutgoingTransfer) -> None:
        self._streams[request_id] = _Stream(transfer, [0] * self._num_layers)

    def close(self, request_id: str) -> None:
        """Releases the request's holds; call it after the transfer has finished or was aborted."""
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            for hold in stream.holds:
                self._manager.release(hold)

    @property
    def num_open(self) -> int:
        return len(self._streams)

    def on_layer_done(self, batch: Batch, layer: int) -> None:
        self.num_computed_layers += 1
        for sequence in batch.sequences:
            stream = self._streams.get(sequence.request.request_id)
            if stream is None:
                continue
            first, end = stream.num_sent_blocks[layer], self._num_complete_blocks(sequence)
            if end <= first:
                continue
            blocks = sequence.block_ids[first:end]
            if layer == 0:
                stream.holds.append(self._manager.hold(blocks))
            stream.transfer.put(layer, first, blocks)
            stream.num_sent_blocks[layer] = end

    def _num_complete_blocks(self, sequence: ScheduledSequence) -> int:
        computed = sequence.start + sequence.num_new_tokens
        size = self._manager.block_size
        return -(-computed // size) if sequence.samples else computed // size
