"""From computed layers to frames: hands every block to the KV sender as soon as a layer of it is complete.

A chunk that ends inside a block leaves that block for the next chunk, unless the prompt ends there. Blocks
found in the prefix cache go out with the first chunk. The sender gathers lazily on its own thread, so the
shipped blocks have a second owner, a hold, until everything is sent; a request may finish, or be preempted
and recomputed elsewhere, without a frame ever reading reused memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem_engine.batch import Batch, ScheduledSequence
from tandem_engine.block_manager import BlockHold, BlockManager
from tandem_engine.transport.base import Outgoing


@dataclass
class Shipment:
    """One request's transfer, as the engine's thread sees it."""

    outgoing: Outgoing
    #: Per layer: logical blocks handed to the sender so far.
    shipped: list[int]
    holds: list[BlockHold] = field(default_factory=list)


class Shipper:
    """The engine's layer listener. Methods run on the engine's thread; the counts may be read from any."""

    def __init__(self, manager: BlockManager, num_layers: int) -> None:
        self._manager = manager
        self._num_layers = num_layers
        #: Layers computed since the start, for whatever requests; shows that the engine moves.
        self.num_computed_layers = 0
        self._shipments: dict[str, Shipment] = {}

    def open(self, request_id: str, outgoing: Outgoing) -> None:
        self._shipments[request_id] = Shipment(outgoing, [0] * self._num_layers)

    def close(self, request_id: str) -> None:
        """Gives the shipped blocks back; call it when the sender is done with the transfer or aborted it."""
        shipment = self._shipments.pop(request_id, None)
        if shipment is not None:
            for hold in shipment.holds:
                self._manager.release(hold)

    @property
    def num_open(self) -> int:
        return len(self._shipments)

    def on_layer_done(self, batch: Batch, layer: int) -> None:
        self.num_computed_layers += 1
        for sequence in batch.sequences:
            shipment = self._shipments.get(sequence.request.request_id)
            if shipment is None:
                continue
            first, end = shipment.shipped[layer], self._complete_blocks(sequence)
            if end <= first:
                continue
            blocks = sequence.block_ids[first:end]
            if layer == 0:
                shipment.holds.append(self._manager.hold(blocks))
            shipment.outgoing.put(layer, first, blocks)
            shipment.shipped[layer] = end

    def _complete_blocks(self, sequence: ScheduledSequence) -> int:
        computed = sequence.start + sequence.num_new_tokens
        size = self._manager.block_size
        return -(-computed // size) if sequence.samples else computed // size
