"""Slots of recurrent states: each holds the state of the text that the owners believe it holds."""

import random
from dataclasses import replace

import pytest
import torch
from tandem_core.errors import InvariantError
from tandem_core.model.spec import CacheGroup, CacheKind, CachePart
from tandem_engine.state_pool import (
    MAX_SNAPSHOTS,
    SNAPSHOT_BYTES,
    StatePool,
    num_state_slots,
    slot_bytes,
)
from tandem_engine.state_slots import StateSlots, StateStep

BLOCK = 4


class System:
    """Slots whose states are the texts themselves, and sequences that compute them."""

    def __init__(self, num_slots: int) -> None:
        self.slots = StateSlots(num_slots, BLOCK)
        self.states: dict[int, tuple[int, ...]] = {}
        self.texts: dict[str, tuple[int, ...]] = {}
        #: Texts whose blocks are cached.
        self.cached: set[tuple[int, ...]] = set()

    def keys(self, text: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Of the leading blocks that are cached, one token fewer than the text at most."""
        keys: list[tuple[int, ...]] = []
        while (end := BLOCK * (len(keys) + 1)) < len(text) and text[:end] in self.cached:
            keys.append(text[:end])
        return keys

    def begin(self, name: str, text: tuple[int, ...]) -> bool:
        done = self.slots.begin(name, len(text), self.keys(text))
        if done:
            self.texts[name] = text
        return done

    def step(self, name: str, num_rows: int) -> None:
        done, text = self.slots.num_tokens(name), self.texts[name]
        self.run(self.slots.plan(name, num_rows), text[done : done + num_rows])
        self.finish(name, done + num_rows)

    def run(self, step: StateStep, rows: tuple[int, ...]) -> None:
        before = self.states[step.initial] if step.initial >= 0 else ()
        if step.snapshot >= 0:
            self.states[step.snapshot] = before + rows[: step.snapshot_rows]
        if step.final >= 0:
            self.states[step.final] = before + rows

    def finish(self, name: str, num_tokens: int) -> None:
        text = self.texts[name]
        self.cached |= {text[:end] for end in range(BLOCK, num_tokens + 1, BLOCK)}
        if end := self.slots.advanced(name, num_tokens):
            self.slots.publish(name, text[:end])
        assert self.states[self.slots.live(name)] == text[:num_tokens]

    def free(self, name: str, *, keep: bool = True) -> None:
        text, copied = self.texts.pop(name), self.slots.copied(name)
        self.slots.free(name, text[:copied] if copied and keep else None)

    def check(self) -> None:
        assert self.slots.check(self.texts.keys()) == []
        for key, slot in self.slots._snapshots.items():
            assert self.states[slot] == key


def tokens(*parts: tuple[int, int]) -> tuple[int, ...]:
    """n times a token, for each (token, n)."""
    return tuple(token for token, n in parts for _ in range(n))


def test_an_equal_prompt_goes_on_from_the_last_boundary() -> None:
    system = System(4)
    prompt = tokens((1, 11))
    assert system.begin("a", prompt)
    system.step("a", 11)
    assert system.begin("b", prompt)
    assert system.slots.num_tokens("b") == 8
    # It needs no copy of the snapshot: the first step reads that and writes the live slot.
    snapshot = system.slots.plan("b", 3).initial
    assert snapshot not in (system.slots.live("a"), system.slots.live("b"))
    system.step("b", 3)
    system.check()


def test_the_second_prompt_that_leaves_a_text_makes_a_snapshot_there() -> None:
    system = System(9)
    shared = tokens((1, 17))
    for name, own in (("a", 2), ("b", 3), ("c", 4)):
        assert system.begin(name, shared + tokens((own, 12)))
        num_tokens = system.slots.num_tokens(name)
        assert num_tokens == {"a": 0, "b": 0, "c": 16}[name]
        while num_tokens < 29:
            num_rows = system.slots.most_rows(name, 29 - num_tokens)
            system.step(name, num_rows)
            num_tokens += num_rows
        system.check()
    # Prompt ends and the divergence.
    assert sorted(map(len, system.slots._snapshots)) == [16, 28, 28, 28]


def test_a_freed_sequence_leaves_its_last_boundary() -> None:
    system = System(4)
    system.begin("a", tokens((1, 6)))
    system.step("a", 6)
    system.texts["a"] += tokens((2, 7))  # generated
    for _ in range(7):
        system.step("a", 1)
    system.free("a")
    assert system.begin("b", tokens((1, 6), (2, 7), (3, 5)))
    assert system.slots.num_tokens("b") == 12
    system.check()


def test_a_skipped_step_goes_back_to_the_copy_or_the_begin() -> None:
    system = System(4)
    system.begin("a", tokens((1, 3), (2, 10)))
    system.step("a", 3)
    assert system.slots.rewind("a", 3) == 3
    assert system.slots.rewind("a", 2) == 0
    assert system.slots.plan("a", 2) == StateStep(-1, system.slots.live("a"))
    system.step("a", 10)
    assert system.slots.rewind("a", 9) == 8
    system.step("a", 3)
    system.check()


def test_a_draft_writes_nothing_and_its_path_is_replayed() -> None:
    system = System(3)
    system.begin("a", tokens((1, 30)))
    system.step("a", 6)
    assert system.slots.plan("a", 5, writes=False) == StateStep(system.slots.live("a"), -1)
    step = system.slots.plan("a", 3)
    assert (step.snapshot_rows, step.final) == (2, system.slots.live("a"))
    # A step that failed: the next one makes the copy that belongs to it.
    assert system.slots.plan("a", 1).snapshot == -1
    system.step("a", 3)
    system.check()


def test_snapshots_make_room_for_sequences_but_not_for_each_other_without_need() -> None:
    system = System(3)
    for name in "ab":
        assert system.begin(name, tokens((ord(name), 5)))
        system.step(name, 5)
        system.free(name)
    assert system.slots.num_snapshots == 2
    assert system.slots.num_free == 3
    assert system.begin("b2", tokens((ord("b"), 9)))  # uses b's snapshot
    assert system.begin("c", tokens((3, 9)))
    assert system.slots.num_snapshots == 1  # a's was used longest ago
    assert not system.begin("d", tokens((4, 9)))  # b's is still to be read
    system.step("b2", 2)
    assert system.begin("d", tokens((4, 9)))
    system.step("c", 9)  # without a copy, for want of a slot
    assert system.slots.copied("c") == 0
    system.check()


def test_what_has_no_state_or_has_one_already_raises() -> None:
    slots = StateSlots(2, BLOCK)
    slots.begin("a", 3)
    with pytest.raises(InvariantError, match="already has a state"):
        slots.begin("a", 3)
    with pytest.raises(InvariantError, match="has no state"):
        slots.plan("b", 1)
    with pytest.raises(ValueError, match="need a slot"):
        StateSlots(0, BLOCK)


def test_random_traffic_never_mixes_texts() -> None:
    rng = random.Random(1)
    system = System(6)
    names = iter(range(10_000))
    for _ in range(3000):
        running = list(system.texts)
        action = rng.random()
        if action < 0.15 or not running:
            base = rng.choice([(), *system.cached])
            text = base[: rng.randrange(len(base) + 1)] + tuple(rng.choices((1, 2), k=rng.randrange(1, 20)))
            system.begin(str(next(names)), text)
        elif action < 0.3:
            system.free(rng.choice(running), keep=rng.random() < 0.8)
        else:
            name = rng.choice(running)
            done = system.slots.num_tokens(name)
            if rng.random() < 0.1:
                done = system.slots.rewind(name, rng.randrange(done + 1))
            if len(system.texts[name]) == done:
                system.texts[name] += (rng.choice((1, 2)),)
            left = len(system.texts[name]) - done
            system.step(name, system.slots.most_rows(name, rng.randrange(1, left + 1)))
        system.check()


GROUP = CacheGroup(
    CacheKind.STATE, (0, 2), (CachePart("conv", (3, 10)), CachePart("recurrent", (2, 4, 6), "float32"))
)


def test_a_slot_travels_as_bytes() -> None:
    source, destination = (StatePool(GROUP, 3, torch.bfloat16, torch.device("cpu")) for _ in range(2))
    assert source.layer_bytes == 3 * 10 * 2 + 2 * 4 * 6 * 4
    for parts in source.layers:
        for part in parts:
            part.copy_(torch.randn(part.shape))
    for layer in range(2):
        destination.scatter(layer, 2, memoryview(source.gather(layer, 1)))
    for sent, received in zip(source.layers, destination.layers, strict=True):
        for a, b in zip(sent, received, strict=True):
            assert torch.equal(a[1], b[2])
            assert not b[:2].any()
    with pytest.raises(InvariantError, match="a state of 5 bytes"):
        source.scatter(0, 0, memoryview(bytes(5)))


def test_the_number_of_slots_follows_the_batch_and_the_memory_of_snapshots() -> None:
    slot = 2 * (3 * 10 * 2 + 2 * 4 * 6 * 4)
    assert slot_bytes(GROUP, torch.bfloat16) == slot
    assert num_state_slots(GROUP, torch.bfloat16, 5) == 10 + MAX_SNAPSHOTS
    large = replace(GROUP, parts=(CachePart("recurrent", (64, 128, 128), "float32"),))
    assert num_state_slots(large, torch.bfloat16, 5) == 10 + SNAPSHOT_BYTES // (2 * 64 * 128 * 128 * 4)
