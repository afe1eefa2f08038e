"""Streams KV to the decode pod while the prompt is computed.

After each layer of each chunk the completed blocks of that layer go to the KV sender, of layers with a window
those that the decode pod wants. A chunk that ends inside a block leaves that block to the next chunk, unless
the prompt ends there. Recurrent states go with the last chunk. Blocks found in the prefix cache are sent with
the first chunk. The sender reads blocks later, on its own thread. A hold keeps them allocated until the
transfer ends, even if the request finishes, is preempted or leaves them behind its window earlier, so no
frame reads reused memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem_core.model.spec import CacheGroup, CacheKind
from tandem_engine.batch import Batch, ScheduledSequence
from tandem_engine.block_manager import BlockHold, BlockManager
from tandem_engine.transport.outgoing import OutgoingTransfer


@dataclass
class _Stream:
    """One request's transfer, as the engine's thread sees it."""

    transfer: OutgoingTransfer
    #: For each layer, the first logical block that is not given to the sender yet.
    next_block: list[int]
    holds: list[BlockHold] = field(default_factory=list)


class KVStreamer:
    """The engine's layer listener. Methods run on the engine's thread; counts may be read from any thread."""

    def __init__(self, manager: BlockManager, groups: Sequence[CacheGroup]) -> None:
        self._manager = manager
        self._groups = groups
        self._group_of = {layer: g for g, group in enumerate(groups) for layer in group.layers}
        #: Layers computed since the start, for any request; shows that the engine makes progress.
        self.num_computed_layers = 0
        self._streams: dict[str, _Stream] = {}

    def open(self, request_id: str, transfer: OutgoingTransfer) -> None:
        first = [min(blocks, default=0) for blocks in transfer.ticket.wanted_blocks]
        first += [0] * (len(self._groups) - len(first))
        next_block = [first[self._group_of[layer]] for layer in range(len(self._group_of))]
        self._streams[request_id] = _Stream(transfer, next_block)

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
        group = self._group_of[layer]
        is_first = layer == self._groups[group].layers[0]
        for sequence in batch.sequences:
            stream = self._streams.get(sequence.request.request_id)
            if stream is None:
                continue
            if self._groups[group].kind is CacheKind.STATE:
                self._put_state(stream, sequence, layer)
                continue
            first, end = stream.next_block[layer], self._num_complete_blocks(sequence)
            if end <= first:
                continue
            blocks = sequence.block_ids[group][first:end]
            # A ticket that wants blocks behind the prompt's last window does not get them.
            while blocks and not self._manager.is_block(group, blocks[0]):
                first, blocks = first + 1, blocks[1:]
            if is_first:
                stream.holds.append(self._manager.hold(blocks, group))
            stream.transfer.put(layer, first, blocks)
            stream.next_block[layer] = end

    def _put_state(self, stream: _Stream, sequence: ScheduledSequence, layer: int) -> None:
        """After the last chunk, the state in the slot that the step has written."""
        if not sequence.samples or sequence.state is None or stream.next_block[layer]:
            return
        group, slots = self._group_of[layer], (sequence.state.final,)
        if layer == self._groups[group].layers[0]:
            stream.holds.append(self._manager.hold(slots, group))
        stream.transfer.put(layer, 0, slots)
        stream.next_block[layer] = 1

    def _num_complete_blocks(self, sequence: ScheduledSequence) -> int:
        computed = sequence.start + sequence.num_new_tokens
        size = self._manager.block_size
        return -(-computed // size) if sequence.samples else computed // size
