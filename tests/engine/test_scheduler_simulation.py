"""Random requests, drafts, aborts, failures and transfers in tiny pools, against two oracles.

Tokens: each request must emit exactly what a trivial loop emits that knows neither blocks nor drafts.
KV:     the simulated cache stores, for each slot, the whole text that its entry was computed from. Every
        token of every step checks all the entries it would attend to, so a block that is reused too
        early, shared wrongly, left behind by a draft, or freed while a window reaches it is found where a
        model would read it.
"""

import math
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_core.sampling import FinishReason, SamplingParams
from tandem_engine.batch import Batch, ScheduledSequence
from tandem_engine.block_manager import BlockGroup, BlockHold, BlockManager
from tandem_engine.draft_tree import DraftTree
from tandem_engine.request import Request, RequestStatus
from tandem_engine.scheduler import Reservation, Scheduler, SchedulerConfig

BLOCK = 4
VOCAB = 8
EOS = 0
MAX_MODEL_LEN = 48
#: Of a draft.
MOST_NODES = 9

Text = tuple[int, ...]


def next_token(text: Text) -> int:
    """The "model": depends on every token before, and ends a text about every 16 tokens."""
    digest = zlib.crc32(bytes(text))
    return EOS if digest % 16 == 0 else 1 + digest // 16 % (VOCAB - 1)


def oracle(request: Request) -> list[int]:
    sampling = request.sampling
    output: list[int] = []
    while len(output) < sampling.max_tokens and request.num_prompt_tokens + len(output) < MAX_MODEL_LEN:
        output.append(next_token((*request.prompt_token_ids, *output)))
        stops = output[-1] in sampling.stop_token_ids or (output[-1] == EOS and not sampling.ignore_eos)
        if stops and len(output) >= sampling.min_tokens:
            break
    return output


@dataclass(frozen=True)
class Verified:
    token_ids: tuple[int, ...]
    path: tuple[int, ...]


class FakeModel:
    """Writes, checks and moves KV of all groups as the model runner does. What stands for no block is outside
    of `kv`."""

    def __init__(self, groups: Sequence[BlockGroup]) -> None:
        self.groups = groups
        self.kv: list[list[tuple[bytes, Text] | None]] = [[None] * (g.num_blocks * BLOCK) for g in groups]

    def slots(self, tables: tuple[tuple[int, ...], ...], index: int) -> list[int]:
        """Of each group."""
        return [block_ids[index // BLOCK] * BLOCK + index % BLOCK for block_ids in tables]

    def fill(
        self, request: Request, tables: tuple[tuple[int, ...], ...], group: int, logical_block: int
    ) -> None:
        """What a transfer writes: one block of the prompt."""
        for i in range(logical_block * BLOCK, min((logical_block + 1) * BLOCK, request.num_prompt_tokens)):
            text = tuple(request.prompt_token_ids[: i + 1])
            self.kv[group][self.slots(tables, i)[group]] = (request.cache_salt, text)

    def run(self, batch: Batch) -> list[Verified]:
        for sequence in batch.sequences:
            self._write(sequence)
        return [self._verify(s) for s in batch.sequences if s.samples]

    def _texts(self, sequence: ScheduledSequence) -> list[Text]:
        """For each new token, the text that ends with it."""
        request, start = sequence.request, sequence.start
        if sequence.draft is None:
            return [tuple(request.tokens(0, start + i + 1)) for i in range(sequence.num_new_tokens)]
        texts = [tuple(request.tokens(0, start + 1))]
        for token, parent in zip(sequence.draft.token_ids, sequence.draft.parents, strict=True):
            texts.append((*texts[parent], token))
        return texts

    def _write(self, sequence: ScheduledSequence) -> None:
        request = sequence.request
        known = tuple(request.tokens(0, sequence.start))
        for g, group in enumerate(self.groups):
            window = group.window or sequence.start + 1
            for i in range(max(0, sequence.start + 1 - window), sequence.start):
                found = self.kv[g][self.slots(sequence.block_ids, i)[g]]
                assert found == (request.cache_salt, known[: i + 1]), (
                    f"wrong KV under {request.request_id} at {i} in group {g}"
                )
        for i, text in enumerate(self._texts(sequence)):
            assert text[-1] == sequence.token_ids[i]
            for kv, slot in zip(self.kv, self.slots(sequence.block_ids, sequence.start + i), strict=True):
                kv[slot] = (request.cache_salt, text)

    def _verify(self, sequence: ScheduledSequence) -> Verified:
        texts = self._texts(sequence)
        if sequence.draft is None:
            return Verified((next_token(texts[-1]),), (0,))
        children = sequence.draft.children()
        path, tokens = [0], [next_token(texts[0])]
        while (node := children[path[-1]].get(tokens[-1])) is not None:
            path.append(node)
            tokens.append(next_token(texts[node]))
        for g, kv in enumerate(self.kv):
            slots = [self.slots(sequence.block_ids, sequence.start + n)[g] for n in range(len(texts))]
            moved = [kv[slots[node]] for node in path]
            for i, entry in enumerate(moved):
                kv[slots[i]] = entry
        return Verified(tuple(tokens), tuple(path))


@dataclass
class Transfer:
    """A prefill pod that fills a reservation block by block, and goes on for a while after an abort."""

    request: Request
    reservation: Reservation
    holds: list[BlockHold]
    #: Groups and logical blocks.
    todo: list[tuple[int, int]] = field(default_factory=list)


class Simulation:
    def __init__(
        self,
        rng: random.Random,
        *,
        num_blocks: int,
        prefix_caching: bool,
        windows: Sequence[int | None] = (None,),
        **config: int,
    ) -> None:
        self.rng = rng
        groups = [BlockGroup(num_blocks, window) for window in windows]
        self.model = FakeModel(groups)
        self.blocks = BlockManager(
            groups,
            BLOCK,
            max_step_tokens=max(config["chunk_size"], MOST_NODES + 1),
            enable_prefix_caching=prefix_caching,
        )
        self.capacity = num_blocks * BLOCK
        self.scheduler = Scheduler(self.blocks, SchedulerConfig(max_model_len=MAX_MODEL_LEN, **config))
        self.live: list[Request] = []
        self.unreserved: list[Request] = []
        self.transfers: list[Transfer] = []
        self.all: list[Request] = []
        self.num_drafted_tokens = 0
        #: Moves on by a second per step, so that answers become late.
        self.now = 0.0

    def new_request(self) -> None:
        rng = self.rng
        # Few distinct prompts, so that prefixes are shared, also under different salts.
        longest = min(30, self.capacity - 2)
        stem = [rng.randrange(2)] * rng.choice([0, 4, 8, 12]) + [rng.randrange(3) for _ in range(20)]
        prompt = stem[: rng.randint(1, longest)]
        max_tokens = rng.randint(1, min(16, self.capacity + 1 - len(prompt)))
        sampling = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=rng.randint(0, max_tokens),
            stop_token_ids=rng.choice([(), (3,)]),
            ignore_eos=rng.random() < 0.3,
        )
        salt = rng.choice([b"", b"", b"other"])
        # Some are due long before those that came earlier, some never.
        due = self.now + rng.choice([0.0, 3.0, 60.0, math.inf])
        request = Request(str(len(self.all)), prompt, sampling, salt, frozenset({EOS}), due=due)
        self.all.append(request)
        self.live.append(request)
        if rng.random() < 0.4:
            self.unreserved.append(request)
        else:
            self.scheduler.add(request)

    def random_draft(self, request: Request) -> DraftTree:
        texts = [(*request.prompt_token_ids, *request.output_token_ids)]
        tokens, parents = [], []
        for i in range(self.rng.randint(1, MOST_NODES)):
            parent = max(0, i - self.rng.randrange(3))
            good = self.rng.random() < 0.7
            token = next_token(texts[parent]) if good else self.rng.randrange(VOCAB)
            tokens.append(token)
            parents.append(parent)
            texts.append((*texts[parent], token))
        return DraftTree(tuple(tokens), tuple(parents), ("output",) * len(tokens))

    def transfer_some(self) -> None:
        for request in [r for r in self.unreserved if r.status is RequestStatus.WAITING]:
            if (reservation := self.scheduler.reserve(request)) is None:
                break
            self.unreserved.remove(request)
            wanted = list(enumerate(reservation.wanted_blocks))
            holds = [self.blocks.hold([reservation.block_ids[g][i] for i in own], g) for g, own in wanted]
            todo = [(g, i) for g, own in wanted for i in own]
            if self.rng.random() < 0.5:
                self.rng.shuffle(todo)
            self.transfers.append(Transfer(request, reservation, holds, todo))
        for transfer in list(self.transfers):
            for _ in range(self.rng.randint(0, 3)):
                if transfer.todo:
                    self.model.fill(transfer.request, transfer.reservation.block_ids, *transfer.todo.pop(0))
            fails = self.rng.random() < 0.1
            if fails or not transfer.todo:
                self.end_transfer(transfer)

    def end_transfer(self, transfer: Transfer) -> None:
        request = transfer.request
        self.transfers.remove(transfer)
        for hold in transfer.holds:
            self.blocks.release(hold)
        if request.status is RequestStatus.FINISHED:
            return
        if transfer.todo:
            missing = [[i for g, i in transfer.todo if g == group] for group in range(self.blocks.num_groups)]
            self.scheduler.adopt(request, self.blocks.num_received(request, missing), None)
        elif self.rng.random() < 0.2:  # all KV came, the call that brings the token did not
            self.scheduler.adopt(request, request.num_prompt_tokens, None)
        else:
            first = next_token(tuple(request.prompt_token_ids))
            self.scheduler.adopt(request, request.num_prompt_tokens, (first,))

    def disturb(self, abort_rate: float) -> None:
        """What may happen at any time, also while a step is under way."""
        if self.rng.random() < abort_rate and self.live:
            request = self.rng.choice(self.live)
            if request in self.unreserved:
                self.unreserved.remove(request)
                request.finish_reason = FinishReason.CANCELLED
            else:
                self.scheduler.abort(request.request_id)
        self.transfer_some()

    def step(self, abort_rate: float) -> bool:
        """One turn of a pod's loop; whether a batch ran."""
        for request in self.live:
            if request.is_decoding and self.rng.random() < 0.7:
                request.draft = self.random_draft(request)
        batch = self.scheduler.schedule(now=self.now)
        self.now += 1.0
        self.audit()
        self.disturb(abort_rate)
        self.audit()
        if batch is not None:
            assert batch.num_tokens <= self.scheduler.config.max_tokens_per_step
            verified = self.model.run(batch)
            updates = self.scheduler.update(batch, verified)
            self.num_drafted_tokens += sum(max(len(u.new_token_ids) - 1, 0) for u in updates)
            self.audit()
        self.live = [r for r in self.live if r.finish_reason is None]
        return batch is not None

    @property
    def reserved(self) -> set[str]:
        return {t.request.request_id for t in self.transfers}

    def audit(self) -> None:
        assert self.scheduler.check() == []
        for request_id in self.blocks.owners():
            for group, ids in enumerate(self.blocks.block_ids(request_id)):
                held = sum(self.blocks.is_block(group, block_id) for block_id in ids)
                window = self.model.groups[group].window
                if window is not None and request_id not in self.reserved:
                    assert held <= math.ceil((window + self.blocks.max_step_tokens) / BLOCK) + 1
        usage = self.blocks.usage()
        assert usage.free + usage.used == usage.total
        assert usage.cached <= usage.free

    def run(self, num_requests: int, abort_rate: float) -> None:
        idle = 0
        while len(self.all) < num_requests or self.live or self.transfers:
            if len(self.all) < num_requests and self.rng.random() < 0.4:
                self.new_request()
            ran = self.step(abort_rate)
            idle = 0 if ran else idle + 1
            assert idle < 200, f"stuck: {self.scheduler.counts()}, {self.blocks.usage()}"
        for request in self.all:
            expected = oracle(request)
            if request.finish_reason is FinishReason.CANCELLED:
                assert request.output_token_ids == expected[: len(request.output_token_ids)]
            else:
                assert request.output_token_ids == expected
        assert self.blocks.usage().used == 0
        assert not self.scheduler.has_work()


TINY = {"num_blocks": 12, "max_batch": 4, "max_tokens_per_step": 12, "chunk_size": 7}
SHAPES = {
    "a roomy pool": {"num_blocks": 100, "max_batch": 8, "max_tokens_per_step": 64, "chunk_size": 16},
    "a tiny pool": TINY,
    "a pool of one request": TINY | {"num_blocks": 8},
    "one place": TINY | {"max_batch": 1},
    "a budget of one token each": TINY | {"max_tokens_per_step": 4},
}


WINDOWS: dict[str, tuple[int | None, ...]] = {
    "full": (None,),
    "a window": (9,),
    "a window beside full": (5, None),
    "two windows": (None, 3, 14),
}


@pytest.mark.parametrize("windows", [(5, None), (3,)], ids=["beside full", "alone"])
def test_layers_with_a_window_hold_no_more_than_it(windows):
    num_cached = 0
    for seed in range(8):
        simulation = Simulation(
            random.Random(seed), prefix_caching=True, windows=windows, **SHAPES["a roomy pool"]
        )
        simulation.run(num_requests=30, abort_rate=0.05)
        num_cached += sum(r.num_cached_tokens for r in simulation.all)
    assert num_cached > 0


@pytest.mark.parametrize("prefix_caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_request_gets_its_tokens_and_nothing_leaks(shape, prefix_caching):
    num_preemptions = num_drafted = num_cached = 0
    for seed in range(6):
        simulation = Simulation(random.Random(seed), prefix_caching=prefix_caching, **SHAPES[shape])
        simulation.run(num_requests=30, abort_rate=0.05)
        num_preemptions += sum(r.num_preemptions for r in simulation.all)
        num_cached += sum(r.num_cached_tokens for r in simulation.all)
        num_drafted += simulation.num_drafted_tokens
    # The simulation is worth something only if it met what it is for.
    assert (num_cached > 0) == prefix_caching
    assert num_drafted > 0 or shape == "a budget of one token each"
    if shape == "a tiny pool":
        assert num_preemptions > 0


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(4, 20),
    max_batch=st.integers(1, 6),
    spare_budget=st.integers(0, 20),
    chunk_size=st.integers(1, 20),
    abort_rate=st.sampled_from([0.0, 0.1]),
    windows=st.sampled_from(list(WINDOWS.values())),
)
def test_limits_of_any_size(seed, num_blocks, max_batch, spare_budget, chunk_size, abort_rate, windows):
    simulation = Simulation(
        random.Random(seed),
        num_blocks=num_blocks,
        prefix_caching=True,
        max_batch=max_batch,
        max_tokens_per_step=max_batch + spare_budget,
        chunk_size=chunk_size,
        windows=windows,
    )
    simulation.run(num_requests=12, abort_rate=abort_rate)


@pytest.mark.wide
@pytest.mark.parametrize("seed", range(400))
def test_many_more(seed):
    rng = random.Random(seed)
    shape, windows = rng.choice(list(SHAPES.values())), rng.choice(list(WINDOWS.values()))
    simulation = Simulation(rng, prefix_caching=rng.random() < 0.8, windows=windows, **shape)
    simulation.run(num_requests=60, abort_rate=0.05)
