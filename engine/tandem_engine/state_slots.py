"""Recurrent states: which slot holds the state of which text.

A layer with a recurrent state keeps a tensor of fixed size per sequence, which every token changes. A slot
holds the states of all such layers after some text.

    begin(r, ...)     a live slot; the first step reads the snapshot of a cached prefix, or zeros
    plan(r, n)        which slots a step, or the replay of an accepted path, reads and writes
    (the step runs)
    advanced(r, n)    the live slot covers n tokens; a copy made on the way is kept
    publish(r, key)   the copy becomes a snapshot, which later prompts find by their prefix
    free(r, key)      gives the slots back; the copy becomes a snapshot

Slots of a sequence (block_size 64), 200 tokens computed, then 20 more in one step:

    position   0        64       128      192      256
    live       |------------------------------>200            read and written: covers 220 afterwards
    copy       |----------------------------->|192            made when a step passed 192; none is made now

One copy per sequence, at the last block boundary that a step passed. From it a sequence goes on when its live
state is ahead of its text, because a step was skipped, or gone, because it was preempted. As a snapshot it
serves prompts with the same prefix. Snapshots are published at the end of a prompt, when a sequence is freed,
and where a prompt left a cached text that has no snapshot there: the next prompt that leaves it at the same
place finds one (after Marconi: Pan et al., 2024, arxiv 2411.19379). A snapshot per block would take more
memory than the keys and values of a text.

Slots that no sequence needs hold snapshots; the one that was used longest ago makes room. A copy for which
there is no room is not made. Like the block manager, all calls come from the engine's thread.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence, Set
from dataclasses import dataclass

from tandem_core.errors import InvariantError


@dataclass(frozen=True)
class StateStep:
    """The slots of one sequence in a step, as tandem_kernels.StateMetadata has them; -1: none."""

    initial: int
    final: int
    snapshot: int = -1
    snapshot_rows: int = 0


@dataclass
class _Sequence:
    live: int
    #: Tokens that the live slot covers.
    num_tokens: int
    #: Read by the next step instead of the live slot, -1 for zeros; None: the live slot.
    source: int | None
    #: Block boundaries at which a copy becomes a snapshot: the prompt's last, and where it leaves a cached
    #: text.
    published: frozenset[int]
    #: The slot of the copy and the tokens it covers.
    copy: tuple[int, int] | None = None
    #: What the step under way makes.
    next_copy: tuple[int, int] | None = None

    def slots(self) -> list[int]:
        copies = [copy[0] for copy in (self.copy, self.next_copy) if copy is not None]
        return [self.live, *copies, *([] if self.source in (None, -1) else [self.source])]


class StateSlots:
    """Owners of slots. A shortage returns False; a broken invariant raises.

    A key names a text up to a block boundary, such as the content of its last block with the chain's hash.
    """

    def __init__(self, num_slots: int, block_size: int) -> None:
        if num_slots < 1 or block_size < 1:
            raise ValueError(f"need a slot and blocks of a token, not {num_slots} and {block_size}")
        self.num_slots = num_slots
        self.block_size = block_size
        self._free = list(range(num_slots))[::-1]
        self._owners: Counter[int] = Counter()
        self._sequences: dict[str, _Sequence] = {}
        # From the one used longest ago to the one used last.
        self._snapshots: OrderedDict[Hashable, int] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Slots that a sequence could take now."""
        return len(self._free) + sum(self._owners[slot] == 1 for slot in self._snapshots.values())

    @property
    def num_snapshots(self) -> int:
        return len(self._snapshots)

    def find(self, keys: Sequence[Hashable]) -> int:
        """How many of a prompt's cached blocks, given by their keys in order, the last snapshot covers."""
        return next((n for n in range(len(keys), 0, -1) if keys[n - 1] in self._snapshots), 0)

    def begin(self, request_id: str, num_prompt_tokens: int, keys: Sequence[Hashable] = ()) -> bool:
        """A slot for a sequence whose leading blocks with these keys are cached; `num_tokens` says how many
        of their tokens its state covers. False, and nothing changed, when all slots are in use.
        """
        if request_id in self._sequences:
            raise InvariantError(f"request {request_id} already has a state")
        found, source = self.find(keys), -1
        if found:
            source = self._snapshots[keys[found - 1]]
            self._snapshots.move_to_end(keys[found - 1])
            self._owners[source] += 1
        live = self._take()
        if live is None:
            self._drop(source)
            return False
        published = {num_prompt_tokens // self.block_size * self.block_size, len(keys) * self.block_size}
        num_tokens = found * self.block_size
        self._sequences[request_id] = _Sequence(
            live, num_tokens, source, frozenset(n for n in published if n > num_tokens)
        )
        return True

    def has_state(self, request_id: str) -> bool:
        return request_id in self._sequences

    def live(self, request_id: str) -> int:
        """The slot whose bytes a transfer reads or writes; what it writes counts from `advanced` on."""
        return self._sequence(request_id).live

    def num_tokens(self, request_id: str) -> int:
        """Tokens that the sequence's state covers."""
        return self._sequence(request_id).num_tokens

    def most_rows(self, request_id: str, num_rows: int) -> int:
        """How many of the next num_rows tokens a step should take: at most one copy is made in it, and
        those that become snapshots must not be left out."""
        own = self._sequence(request_id)
        end = own.num_tokens + num_rows
        last = end // self.block_size * self.block_size
        return min((n for n in own.published if own.num_tokens < n < last), default=end) - own.num_tokens

    def plan(self, request_id: str, num_rows: int, *, writes: bool = True) -> StateStep:
        """The slots of a step over the sequence's next tokens; a draft writes nothing."""
        own = self._sequence(request_id)
        if own.next_copy is not None:  # of a step that failed
            self._drop(own.next_copy[0])
            own.next_copy = None
        initial = own.live if own.source is None else own.source
        if not writes:
            return StateStep(initial, -1)
        boundary = (own.num_tokens + num_rows) // self.block_size * self.block_size
        if boundary <= own.num_tokens or (slot := self._take()) is None:
            return StateStep(initial, own.live)
        own.next_copy = slot, boundary
        return StateStep(initial, own.live, slot, boundary - own.num_tokens)

    def advanced(self, request_id: str, num_tokens: int) -> int:
        """A step or transfer is done: the live slot covers num_tokens. Returns the tokens of a copy that is
        to be published, or 0."""
        own = self._sequence(request_id)
        if num_tokens == own.num_tokens:  # nothing was computed
            return 0
        self._drop(own.source)
        own.source, own.num_tokens = None, num_tokens
        if own.next_copy is None:
            return 0
        if own.copy is not None:
            self._drop(own.copy[0])
        own.copy, own.next_copy = own.next_copy, None
        return own.copy[1] if own.copy[1] in own.published else 0

    def rewind(self, request_id: str, num_tokens: int) -> int:
        """Tokens from which the sequence goes on when only num_tokens of those computed count: what its state
        covers, what its copy covers, or 0."""
        own = self._sequence(request_id)
        if own.num_tokens > num_tokens:
            self._drop(own.source)
            own.source, own.num_tokens = -1, 0
            if own.copy is not None and own.copy[1] <= num_tokens:
                own.source, own.num_tokens = own.copy
                self._owners[own.source] += 1
        return own.num_tokens

    def copied(self, request_id: str) -> int:
        """Tokens that the sequence's copy covers; 0: there is none."""
        copy = self._sequence(request_id).copy
        return 0 if copy is None else copy[1]

    def publish(self, request_id: str, key: Hashable) -> None:
        """The sequence's copy becomes findable by the key of the block before it."""
        copy = self._sequence(request_id).copy
        if copy is None:
            return
        if key in self._snapshots:  # the same state
            self._snapshots.move_to_end(key)
            return
        self._snapshots[key] = copy[0]
        self._owners[copy[0]] += 1

    def free(self, request_id: str, key: Hashable = None) -> None:
        """Ends a sequence; key: of its copy, None to keep no snapshot."""
        if key is not None:
            self.publish(request_id, key)
        for slot in self._sequences.pop(request_id).slots():
            self._drop(slot)

    def share(self, slots: Sequence[int]) -> None:
        """Makes the caller another owner of slots that sequences have, until `drop`."""
        for slot in slots:
            if not self._owners[slot]:
                raise InvariantError(f"slot {slot} belongs to no request: it cannot be held")
            self._owners[slot] += 1

    def drop(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._drop(slot)

    def check(self, request_ids: Set[str], held: Sequence[int] = ()) -> list[str]:
        """One sentence per fault; empty when every invariant holds, these requests have the states, and
        transfers hold these slots."""
        owners = Counter(self._snapshots.values())
        owners.update(held)
        for own in self._sequences.values():
            owners.update(own.slots())
        faults = []
        if self._sequences.keys() != request_ids:
            faults.append("the requests that have a state and those that should have one differ")
        if owners != +self._owners:
            faults.append("the owners of slots and their counts differ")
        if sorted([*self._free, *owners]) != list(range(self.num_slots)):
            faults.append("a slot is neither free nor owned, or both")
        return faults

    def _take(self) -> int | None:
        if not self._free:
            key = next((k for k, slot in self._snapshots.items() if self._owners[slot] == 1), None)
            if key is None:
                return None
            self._drop(self._snapshots.pop(key))
        slot = self._free.pop()
        self._owners[slot] = 1
        return slot

    def _drop(self, slot: int | None) -> None:
        if slot is None or slot == -1:
            return
        self._owners[slot] -= 1
        if not self._owners[slot]:
            self._free.append(slot)

    def _sequence(self, request_id: str) -> _Sequence:
        own = self._sequences.get(request_id)
        if own is None:
            raise InvariantError(f"request {request_id} has no state")
        return own
