"""The scheduler, rule by rule. test_scheduler_simulation.py lets all rules meet at random."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from tandem_core.errors import CapacityError, InvalidRequestError, InvariantError
from tandem_core.sampling import FinishReason, SamplingParams
from tandem_engine.batch import Batch
from tandem_engine.block_manager import BlockGroup, BlockManager
from tandem_engine.draft_tree import DraftTree
from tandem_engine.prompt_scores import PromptScores
from tandem_engine.request import Request, RequestStatus
from tandem_engine.scheduler import RequestUpdate, Scheduler, SchedulerConfig

BLOCK = 4
EOS = 99


@dataclass(frozen=True)
class Verified:
    token_ids: tuple[int, ...]
    path: tuple[int, ...]


def plain(token_id: int) -> Verified:
    return Verified((token_id,), (0,))


def make_request(
    request_id: str, num_prompt: int = 6, *, base: int = 0, due: float = math.inf, **sampling: object
) -> Request:
    """Prompts with different ids share no block unless they have the same base."""
    base = base or 1000 * (1 + sum(map(ord, request_id)))
    prompt = list(range(base, base + num_prompt))
    return Request(request_id, prompt, SamplingParams(**sampling), eos_token_ids=frozenset({EOS}), due=due)


def chain(*token_ids: int) -> DraftTree:
    return DraftTree(token_ids, tuple(range(len(token_ids))), ("prompt",) * len(token_ids))


def make(num_blocks: int = 64, **config: int) -> Scheduler:
    config = {"max_model_len": 64, "max_batch": 4, "max_tokens_per_step": 64, "chunk_size": 64} | config
    return Scheduler(BlockManager([BlockGroup(num_blocks)], BLOCK), SchedulerConfig(**config))


def step(scheduler: Scheduler, token_id: int = 7) -> tuple[Batch, list[RequestUpdate]]:
    """One step in which every sampling sequence emits token_id and every draft is rejected."""
    batch = scheduler.schedule()
    assert batch is not None
    progress = scheduler.update(batch, [plain(token_id) for s in batch.sequences if s.samples])
    assert scheduler.check() == []
    return batch, progress


def shape(batch: Batch) -> list[tuple[str, int, int, bool]]:
    return [(s.request.request_id, s.start, s.num_new_tokens, s.samples) for s in batch.sequences]


def used_blocks(scheduler: Scheduler) -> int:
    return scheduler._blocks.usage().used


class TestAdmission:
    def test_a_prompt_that_fills_the_context_is_refused_with_limit_and_remedy(self):
        scheduler = make(max_model_len=16)
        with pytest.raises(InvalidRequestError, match=r"prompt: has 16 tokens.*holds 16.*shorten it to 15"):
            scheduler.add(make_request("a", 16))
        scheduler.add(make_request("b", 15))

    def test_a_request_the_pool_can_never_hold_is_refused(self):
        scheduler = make(num_blocks=4)  # 16 tokens; the last output token needs no KV
        scheduler.add(make_request("fits", 8, max_tokens=9))
        with pytest.raises(CapacityError, match=r"17 tokens.*holds 16.*max_tokens"):
            scheduler.add(make_request("never", 8, max_tokens=10))

    @pytest.mark.parametrize("max_tokens", [24, 1000])
    def test_an_answer_that_only_the_context_limits_is_cut_to_the_pool(self, max_tokens):
        scheduler = make(num_blocks=4, max_model_len=32)
        request = make_request("open", 8, max_tokens=max_tokens, min_tokens=20)
        scheduler.add(request)
        assert (request.sampling.max_tokens, request.sampling.min_tokens) == (9, 9)
        with pytest.raises(CapacityError, match="holds 16"):
            scheduler.add(make_request("never", 17, max_tokens=15))

    def test_an_id_in_use_is_refused(self):
        scheduler = make()
        scheduler.add(make_request("a"))
        with pytest.raises(InvalidRequestError, match="request_id"):
            scheduler.add(make_request("a"))
        with pytest.raises(InvalidRequestError, match="request_id"):
            scheduler.reserve(make_request("a"))

    def test_the_batch_has_so_many_places_and_no_more(self):
        scheduler = make(max_batch=2)
        for name in "abc":
            scheduler.add(make_request(name))
        batch, _ = step(scheduler)
        assert [s.request.request_id for s in batch.sequences] == ["a", "b"]
        assert (scheduler.counts().running, scheduler.counts().waiting) == (2, 1)

    def test_a_request_joins_only_when_all_its_tokens_fit(self):
        scheduler = make(num_blocks=6)
        scheduler.add(make_request("a", 8, max_tokens=2))  # 2 blocks, then 3
        scheduler.add(make_request("b", 17, max_tokens=2))  # 5 blocks
        scheduler.add(make_request("c", 2, max_tokens=2))  # would fit, but came later
        batch, _ = step(scheduler)
        assert shape(batch) == [("a", 0, 8, True)]
        step(scheduler)
        batch, _ = step(scheduler)
        assert batch.sequences[0].request.request_id == "b"

    def test_a_budget_below_the_batch_size_is_a_wrong_setting(self):
        with pytest.raises(ValueError, match="max_tokens_per_step"):
            SchedulerConfig(max_model_len=64, max_batch=8, max_tokens_per_step=4)


class TestChunkedPrefill:
    def test_chunks_end_with_blocks_and_only_the_last_samples(self):
        scheduler = make(chunk_size=10, max_tokens_per_step=10)
        scheduler.add(make_request("a", 19))
        assert shape(step(scheduler)[0]) == [("a", 0, 8, False)]
        assert shape(step(scheduler)[0]) == [("a", 8, 8, False)]
        assert shape(step(scheduler)[0]) == [("a", 16, 3, True)]
        assert shape(step(scheduler)[0]) == [("a", 19, 1, True)]

    def test_a_chunk_that_cannot_reach_a_boundary_advances_anyway(self):
        scheduler = make(chunk_size=3)
        scheduler.add(make_request("a", 7))
        assert [shape(step(scheduler)[0])[0][1:3] for _ in range(3)] == [(0, 3), (3, 1), (4, 3)]

    def test_decoding_sequences_come_first_and_prompts_share_the_rest(self):
        scheduler = make(max_tokens_per_step=12)
        scheduler.add(make_request("a", 4))
        step(scheduler)
        scheduler.add(make_request("b", 6))
        scheduler.add(make_request("c", 20))
        assert shape(step(scheduler)[0]) == [("a", 4, 1, True), ("b", 0, 6, True), ("c", 0, 4, False)]

    def test_a_step_with_enough_of_one_prompt_takes_no_other(self):
        scheduler = make(max_tokens_per_step=64, enough_prompt_tokens=10)
        for name, length in (("a", 4), ("b", 5), ("c", 12), ("d", 4)):
            scheduler.add(make_request(name, length))
        batch, _ = step(scheduler)
        assert shape(batch) == [("a", 0, 4, True), ("b", 0, 5, True), ("c", 0, 12, True)]
        batch, _ = step(scheduler)
        assert shape(batch)[3:] == [("d", 0, 4, True)]
        assert len(batch.sequences) == 4, "those that decode are in every step"

    def test_a_step_with_texts_takes_no_more_prompt_tokens_than_saturate_the_processor(self):
        scheduler = make(enough_prompt_tokens=8)
        scheduler.add(make_request("text", 20))
        assert shape(step(scheduler)[0]) == [("text", 0, 20, True)], "nothing decodes"
        for name, length in (("a", 5), ("b", 20)):
            scheduler.add(make_request(name, length, max_tokens=1))
        text = ("text", 20, 1, True)
        assert shape(step(scheduler)[0]) == [text, ("a", 0, 5, True), ("b", 0, 3, False)]
        assert shape(step(scheduler)[0])[1:] == [("b", 3, 5, False)], "up to the end of a block"
        assert shape(step(scheduler)[0])[1:] == [("b", 8, 8, False)]
        assert shape(step(scheduler)[0])[1:] == [("b", 16, 4, True)]

    @pytest.mark.parametrize("max_tokens", [1, 9])
    def test_prompts_that_arrive_together_are_computed_one_after_another(self, max_tokens):
        """The first one's first token comes as early as if it was alone. Each that has it gets a token in
        every step, and the next prompt takes as many steps as one beside a text."""
        scheduler = make(chunk_size=16, max_tokens_per_step=32, enough_prompt_tokens=8)
        requests = [make_request(name, 32, max_tokens=max_tokens) for name in ("a", "b", "c", "d")]
        for request in requests:
            scheduler.add(request)
        first_tokens: list[int] = []
        num_steps = 0
        while len(first_tokens) < 4:
            running = [r for r in requests if r.output_token_ids and r.status is RequestStatus.RUNNING]
            lengths = [len(r.output_token_ids) for r in running]
            step(scheduler)
            num_steps += 1
            assert [len(r.output_token_ids) for r in running] == [length + 1 for length in lengths]
            first_tokens += [num_steps] * (
                sum(bool(r.output_token_ids) for r in requests) - len(first_tokens)
            )
        alone, beside_text = 32 // 16, 32 // 8
        following = alone if max_tokens == 1 else beside_text
        assert first_tokens == [alone + number * following for number in range(4)]

    def test_no_prompt_takes_blocks_before_there_is_a_budget_for_it(self):
        scheduler = make(max_tokens_per_step=8)
        scheduler.add(make_request("a", 20))
        scheduler.add(make_request("b", 20))
        assert shape(step(scheduler)[0]) == [("a", 0, 8, False)]
        assert used_blocks(scheduler) == 5

    def test_computed_chunks_are_shared_with_a_later_prompt(self):
        scheduler = make()
        scheduler.add(make_request("a", 10, base=500))
        step(scheduler)
        late = make_request("late", 12, base=500)
        scheduler.add(late)
        batch, _ = step(scheduler)
        assert shape(batch)[1] == ("late", 8, 4, True)
        assert late.num_cached_tokens == 8
        assert batch.sequences[0].block_ids[0][:2] == batch.sequences[1].block_ids[0][:2]

    def test_of_a_prompt_that_waits_only_what_is_not_cached_is_work(self):
        scheduler = make(max_tokens_per_step=16)
        scheduler.add(make_request("a", 10, base=500))
        step(scheduler)
        scheduler.add(make_request("b", 12, base=500))
        scheduler.add(make_request("c", 3, base=900))
        work = [(one.request_id, one.start, one.stop) for one in scheduler.prompt_work()]
        assert work == [("b", 8, 12), ("c", 0, 3)]
        assert used_blocks(scheduler) == 3, "none is taken for one that waits"


class TestDrafts:
    def start(
        self, scheduler: Scheduler, name: str = "a", num_prompt: int = 6, **sampling: object
    ) -> Request:
        request = make_request(name, num_prompt, **sampling)
        scheduler.add(request)
        step(scheduler)
        return request

    def test_root_and_nodes_are_computed_and_covered_by_blocks(self):
        scheduler = make()
        request = self.start(scheduler)
        request.draft = chain(11, 12, 13)
        batch = scheduler.schedule()
        (sequence,) = batch.sequences
        assert sequence.start == 6
        assert sequence.token_ids == (7, 11, 12, 13)
        assert len(sequence.block_ids[0]) * BLOCK >= 6 + 4
        assert request.draft is None, "a draft is for one step"

    def test_root_and_two_accepted_nodes_are_three_computed_positions_and_three_tokens(self):
        scheduler = make()
        request = self.start(scheduler)
        request.draft = DraftTree((20, 11, 12, 30), (0, 0, 2, 2), ("output",) * 4)
        batch = scheduler.schedule()
        (progress,) = scheduler.update(batch, [Verified((11, 12, 40), (0, 2, 3))])
        assert progress == RequestUpdate(request, (11, 12, 40), finished=False)
        assert (request.num_computed_tokens, request.num_tokens) == (9, 10)
        assert request.is_decoding
        assert scheduler.check() == []

    def test_blocks_of_rejected_nodes_come_back(self):
        scheduler = make()
        request = self.start(scheduler)
        request.draft = chain(*range(10, 20))
        scheduler.update(scheduler.schedule(), [plain(5)])
        assert used_blocks(scheduler) == 2
        assert scheduler.check() == []

    def test_a_draft_shrinks_to_the_blocks_that_are_free(self):
        scheduler = make(num_blocks=4)
        request = self.start(scheduler, max_tokens=10)
        assert used_blocks(scheduler) == 2
        request.draft = chain(*range(10, 30))
        (sequence,) = scheduler.schedule().sequences
        assert sequence.token_ids == (7, *range(10, 19)), "16 slots: 6 computed, the root, 9 nodes"

    def test_a_draft_preempts_nobody(self):
        scheduler = make(num_blocks=5)
        a = self.start(scheduler, "a", 6, max_tokens=8)
        b = self.start(scheduler, "b", 6, max_tokens=8)
        assert (a.num_tokens, b.num_tokens) == (8, 7)
        a.draft = b.draft = chain(1, 2, 3, 4, 5, 6)
        batch = scheduler.schedule()
        # a's blocks are full and it gets the free one for its nodes; b has one slot beside its root.
        assert [len(s.draft) for s in batch.sequences] == [4, 1]
        assert a.num_preemptions == b.num_preemptions == 0

    def test_drafts_leave_half_the_budget_to_a_waiting_prompt(self):
        scheduler = make(max_tokens_per_step=17)
        request = self.start(scheduler)
        scheduler.add(make_request("prompt", 40))
        request.draft = chain(*range(10, 30))
        batch = scheduler.schedule()
        assert shape(batch) == [("a", 6, 9, True), ("prompt", 0, 8, False)]

    def test_no_draft_for_the_last_token(self):
        scheduler = make()
        request = self.start(scheduler, max_tokens=2)
        request.draft = chain(1, 2)
        (sequence,) = scheduler.schedule().sequences
        assert sequence.draft is None

    def test_a_draft_stays_within_the_context(self):
        scheduler = make(max_model_len=12)
        request = self.start(scheduler, num_prompt=6)
        request.draft = chain(*range(10, 20))
        (sequence,) = scheduler.schedule().sequences
        assert sequence.start + sequence.num_new_tokens == 12

    @pytest.mark.parametrize(
        ("tokens", "path"),
        [
            ((12, 5), (0, 2)),  # node 2 is no child of the root
            ((13, 5), (0, 1)),  # node 1 is token 11
            ((11,), (0, 1)),  # as many tokens as nodes
            ((11, 5), (1, 2)),  # must start at the root
            ((11, 12, 13, 14), (0, 1, 2, 3)),  # no such node
        ],
    )
    def test_a_path_that_is_not_the_drafts_is_refused(self, tokens, path):
        scheduler = make()
        request = self.start(scheduler)
        request.draft = chain(11, 12)
        batch = scheduler.schedule()
        with pytest.raises(InvariantError, match="path"):
            scheduler.update(batch, [Verified(tokens, path)])


class TestFinishing:
    def run(self, emitted: Sequence[int], *, max_model_len: int = 64, **sampling: object) -> Request:
        """One request that drafts everything it will emit, so that rules meet several tokens at once."""
        scheduler = make(max_model_len=max_model_len)
        request = make_request("a", **sampling)
        scheduler.add(request)
        _, progress = step(scheduler, emitted[0])
        if not progress[0].finished:
            request.draft = chain(*emitted[1:])
            batch = scheduler.schedule()
            size = batch.sequences[0].num_new_tokens
            verified = Verified((*emitted[1:size], 50), tuple(range(size)))
            progress = scheduler.update(batch, [verified])
        assert scheduler.check() == []
        if progress[0].finished:
            assert used_blocks(scheduler) == 0
            assert request.status is RequestStatus.FINISHED
            assert not scheduler.has_work()
        return request

    def test_the_first_end_token_is_kept_and_what_follows_is_dropped(self):
        request = self.run([1, 2, EOS, 3])
        assert request.output_token_ids == [1, 2, EOS]
        assert (request.finish_reason, request.stop_token_id) == (FinishReason.STOP, None)

    def test_ignore_eos_ignores_it(self):
        request = self.run([1, EOS, 3], ignore_eos=True)
        assert request.output_token_ids == [1, EOS, 3, 50]
        assert request.finish_reason is None

    def test_stop_token_ids_count_even_when_eos_is_ignored(self):
        request = self.run([1, EOS, 3], ignore_eos=True, stop_token_ids=(3,))
        assert (request.output_token_ids, request.stop_token_id) == ([1, EOS, 3], 3)

    def test_before_min_tokens_nothing_stops(self):
        request = self.run([EOS, 3, EOS, 4], min_tokens=3, stop_token_ids=(3,))
        assert request.output_token_ids == [EOS, 3, EOS]

    def test_max_tokens(self):
        request = self.run([1, 2, 3, 4], max_tokens=3)
        assert request.output_token_ids == [1, 2, 3]
        assert request.finish_reason is FinishReason.LENGTH

    def test_one_token_is_enough_for_a_prefill_pod(self):
        request = self.run([1], max_tokens=1)
        assert (request.output_token_ids, request.finish_reason) == ([1], FinishReason.LENGTH)

    def test_a_full_context_ends_the_text(self):
        request = self.run([1, 2, 3, 4], max_model_len=9)
        assert request.num_tokens == 9
        assert request.finish_reason is FinishReason.LENGTH

    def test_an_end_token_at_the_limit_is_a_stop(self):
        assert self.run([EOS], max_tokens=1).finish_reason is FinishReason.STOP

    def test_the_loop_can_end_a_text_at_a_stop_string(self):
        scheduler = make()
        request = make_request("a")
        scheduler.add(request)
        step(scheduler)
        assert scheduler.finish("a", FinishReason.STOP) is request
        assert request.finish_reason is FinishReason.STOP
        assert used_blocks(scheduler) == 0


class TestPreemption:
    def test_the_latest_arrival_goes_keeps_its_tokens_and_comes_back(self):
        scheduler = make(num_blocks=5)
        a, b = make_request("a", 7, max_tokens=8), make_request("b", 7, max_tokens=8)
        scheduler.add(a)
        scheduler.add(b)
        for token in (1, 2):
            step(scheduler, token)
        # Both need a third block and one is free: b has nobody younger, so it waits.
        assert [s.request.request_id for s in step(scheduler)[0].sequences] == ["a"]
        assert (b.num_preemptions, b.num_computed_tokens) == (0, 8)
        while a.num_tokens < 14:
            step(scheduler)
        # a needed a fourth block.
        assert (a.num_preemptions, b.num_preemptions) == (0, 1)
        assert (b.status, b.num_computed_tokens) == (RequestStatus.WAITING, 0)
        assert b.output_token_ids == [1, 2]
        while a.status is not RequestStatus.FINISHED:
            step(scheduler)
        batch, _ = step(scheduler, 4)
        (sequence,) = batch.sequences
        assert sequence.start + sequence.num_new_tokens == 9, "prompt and both outputs are computed again"
        assert b.output_token_ids == [1, 2, 4]

    def test_a_preempted_request_goes_ahead_of_those_that_came_later(self):
        scheduler = make(num_blocks=5)
        for name in "abc":
            scheduler.add(make_request(name, 7, max_tokens=8))
        finished = []
        while scheduler.has_work():
            finished += [p.request.request_id for p in step(scheduler)[1] if p.finished]
        assert finished == ["a", "b", "c"]

    def test_whoever_has_nobody_younger_waits_with_its_kv(self):
        scheduler = make(num_blocks=4)
        other, a = make_request("other", 12, max_tokens=2), make_request("a", 4, max_tokens=8)
        scheduler.reserve(other)
        scheduler.add(a)
        step(scheduler)
        assert scheduler.schedule() is None
        assert scheduler.has_work()
        assert (a.num_preemptions, a.num_computed_tokens) == (0, 4)
        scheduler.abort("other")
        assert shape(step(scheduler)[0]) == [("a", 4, 1, True)]

    def test_the_oldest_takes_blocks_even_from_adopted_requests_that_have_no_place(self):
        scheduler = make(num_blocks=4, max_batch=1)
        other, a = make_request("other", 12, max_tokens=2), make_request("a", 4, max_tokens=8)
        scheduler.reserve(other)
        scheduler.add(a)
        step(scheduler)
        scheduler.adopt(other, 12, (1,))
        assert shape(step(scheduler)[0]) == [("a", 4, 1, True)]
        assert (other.num_preemptions, other.output_token_ids) == (1, [1])
        assert scheduler.counts().waiting == 1


class TestDeadlines:
    """The earliest first token first."""

    def test_the_batch_takes_the_earliest_and_then_the_oldest(self):
        scheduler = make(max_batch=1)
        for name, due in (("late", 9.0), ("none", math.inf), ("early", 1.0), ("as early", 1.0)):
            scheduler.add(make_request(name, 4, max_tokens=1, due=due))
        assert [shape(step(scheduler)[0])[0][0] for _ in range(4)] == ["early", "as early", "late", "none"]

    def test_chunks_of_an_urgent_prompt_overtake_those_of_a_long_one(self):
        scheduler = make(chunk_size=8, max_tokens_per_step=8)
        scheduler.add(make_request("long", 32, max_tokens=1, due=60.0))
        assert shape(step(scheduler)[0]) == [("long", 0, 8, False)]
        scheduler.add(make_request("urgent", 8, max_tokens=1, due=1.0))
        assert shape(step(scheduler)[0]) == [("urgent", 0, 8, True)]
        assert shape(step(scheduler)[0]) == [("long", 8, 8, False)]

    def test_a_prompt_that_the_next_step_cannot_begin_takes_no_blocks(self):
        scheduler = make(chunk_size=8, max_tokens_per_step=8)
        scheduler.add(make_request("first", 32, max_tokens=1, due=1.0))
        scheduler.add(make_request("second", 32, max_tokens=1, due=2.0))
        step(scheduler)
        assert used_blocks(scheduler) == 8, "of the first alone"

    def test_prompts_are_cut_while_a_sequence_decodes(self):
        scheduler = make(chunk_size=32)
        scheduler.add(make_request("prompt", 20, max_tokens=1))
        batch = scheduler.schedule(8)
        assert shape(batch) == [("prompt", 0, 20, True)], "nothing decodes"
        scheduler.update(batch, [plain(7)])
        scheduler.add(make_request("text", 4, max_tokens=9))
        step(scheduler)
        scheduler.add(make_request("other", 20, max_tokens=1))
        assert shape(scheduler.schedule(8)) == [("text", 4, 1, True), ("other", 0, 8, False)]

    def test_tokens_of_prompts_with_log_probabilities_count_more(self):
        scheduler = make(chunk_size=32)
        scored = make_request("scored", 40, max_tokens=1, due=1.0)
        scored.prompt_scores = PromptScores(40, 5)
        scheduler.add(scored)
        scheduler.add(make_request("other", 40, max_tokens=1, due=2.0))
        batch = scheduler.schedule(score_weight=4.0)
        assert shape(batch) == [("scored", 0, 8, False), ("other", 0, 32, False)]

    def test_a_full_batch_pauses_the_last_which_keeps_its_kv(self):
        scheduler = make(max_batch=1)
        batch_job = make_request("batch", 4, max_tokens=4, due=60.0)
        scheduler.add(batch_job)
        step(scheduler)
        scheduler.add(make_request("chat", 4, max_tokens=2, due=1.0))
        assert shape(step(scheduler)[0]) == [("chat", 0, 4, True)]
        assert (batch_job.status, batch_job.num_computed_tokens) == (RequestStatus.WAITING, 4)
        assert shape(step(scheduler)[0]) == [("chat", 4, 1, True)]
        assert shape(step(scheduler)[0]) == [("batch", 4, 1, True)], "goes on where it was"
        assert batch_job.num_preemptions == 0

    def test_equal_deadlines_pause_nobody(self):
        scheduler = make(max_batch=1)
        other = make_request("other", 4, max_tokens=4)
        scheduler.reserve(other)
        scheduler.add(make_request("running", 4, max_tokens=2))
        step(scheduler)
        scheduler.adopt(other, 4, (1,))
        assert shape(step(scheduler)[0])[0][0] == "running"

    @pytest.mark.parametrize(("due", "is_preempted"), [(60.0, True), (9.0, False)])
    def test_blocks_are_taken_from_what_is_due_much_later_only(self, due, is_preempted):
        scheduler = make(num_blocks=4)
        later = make_request("later", 8, max_tokens=5, due=due)
        scheduler.add(later)
        step(scheduler)
        scheduler.add(make_request("urgent", 12, max_tokens=1, due=1.0))
        names = [name for name, *_ in shape(step(scheduler)[0])]
        assert names == (["urgent"] if is_preempted else ["later"])
        assert later.num_preemptions == is_preempted

    def test_nobody_is_preempted_for_one_that_would_not_fit_even_then(self):
        scheduler = make(num_blocks=6)
        later = make_request("later", 4, max_tokens=5, due=60.0)
        scheduler.add(later)
        scheduler.reserve(make_request("in transfer", 14, max_tokens=1, due=2.0))
        step(scheduler)
        scheduler.add(make_request("urgent", 12, max_tokens=1, due=1.0))
        assert shape(step(scheduler)[0])[0][0] == "later"

    def test_a_reservation_passes_a_later_one_that_waits_for_blocks(self):
        scheduler = make(num_blocks=4)
        scheduler.add(make_request("running", 8, max_tokens=8, due=0.0))
        scheduler.add(make_request("waits", 12, max_tokens=1, due=5.0))
        step(scheduler)
        assert scheduler.reserve(make_request("later", 4, max_tokens=1, due=6.0)) is None
        assert scheduler.reserve(make_request("earlier", 4, max_tokens=1, due=4.0)) is not None

    def test_a_reservation_takes_blocks_of_what_is_due_much_later(self):
        scheduler = make(num_blocks=4)
        later = make_request("later", 8, max_tokens=8, due=60.0)
        scheduler.add(later)
        step(scheduler)
        assert scheduler.reserve(make_request("urgent", 12, max_tokens=1, due=1.0)) is not None
        assert later.num_preemptions == 1


class TestLateAnswers:
    """Answers without an objective that they can still meet give way to requests in time."""

    @staticmethod
    def run(scheduler: Scheduler, now: float) -> list[str]:
        """The ids of a step's sequences."""
        batch = scheduler.schedule(now=now)
        assert batch is not None
        scheduler.update(batch, [plain(7) for s in batch.sequences if s.samples])
        assert scheduler.check() == []
        return [s.request.request_id for s in batch.sequences]

    @pytest.mark.parametrize(
        ("objectives", "late_at"),
        [({}, 1.0), ({"ends_by": 5.0}, 5.0), ({"ends_by": 5.0, "token_s": 0.1}, 5.0)],
        ids=["first token", "end", "end and tokens"],
    )
    def test_an_answer_gives_way_when_its_last_objective_is_missed(self, objectives, late_at):
        scheduler = make(max_batch=1)
        answer = make_request("answer", 4, max_tokens=50, due=1.0)
        for name, value in objectives.items():
            setattr(answer, name, value)
        scheduler.add(answer)
        assert self.run(scheduler, 0.0) == ["answer"]
        scheduler.add(make_request("waits", 4, max_tokens=2, due=20.0))
        assert self.run(scheduler, late_at + 0.5) == ["answer"], "one that is nearly in time may end"
        assert self.run(scheduler, late_at + 1.0) == ["waits"]
        assert (answer.status, answer.num_preemptions) == (RequestStatus.WAITING, 0)
        assert self.run(scheduler, late_at + 1.1) == ["waits"]
        assert self.run(scheduler, late_at + 1.2) == ["answer"], "it goes on where it was"

    def test_tokens_that_come_in_time_give_no_way(self):
        scheduler = make(max_batch=1)
        answer = make_request("answer", 4, max_tokens=50, due=1.0)
        answer.token_s = 0.5
        scheduler.add(answer)
        self.run(scheduler, 0.0)
        scheduler.add(make_request("waits", 4, max_tokens=2, due=20.0))
        assert self.run(scheduler, 10.0) == ["answer"]

    def test_a_late_first_token_still_comes_first(self):
        scheduler = make(max_batch=1)
        scheduler.add(make_request("late", 4, max_tokens=2, due=1.0))
        scheduler.add(make_request("in time", 4, max_tokens=2, due=20.0))
        assert self.run(scheduler, 10.0) == ["late"]

    def test_late_answers_take_turns_beside_requests_in_time(self):
        """20 late answers, and more than two minutes in which requests in time need most of the batch."""
        scheduler = make(num_blocks=1000, max_batch=4, max_model_len=2000)
        late = [make_request(f"late {n}", 4, max_tokens=1900, due=0.0) for n in range(20)]
        for request in late:
            scheduler.add(request)
        for tenth in range(60):
            self.run(scheduler, tenth / 10)
        last_ran = dict.fromkeys([r.request_id for r in late], 6.0)
        longest_s, num_joins, before = 0.0, 0, set[str]()
        for tenth in range(60, 1460):
            now = tenth / 10
            if tenth % 11 == 0:
                for name in ("a", "b"):
                    request = make_request(f"{name} {tenth}", 4, max_tokens=20, due=now + 2.5)
                    scheduler.add(request)
            ran = set(self.run(scheduler, now)) & last_ran.keys()
            num_joins += len(ran - before)
            longest_s = max([longest_s, *(now - last_ran[name] for name in ran)])
            last_ran |= dict.fromkeys(ran, now)
            before = ran
        assert longest_s < 82, "without a token: a minute, and a second for each of the others"
        assert min(len(request.output_token_ids) for request in late) >= 10, "a turn has ten steps"
        assert num_joins < 140, "they join and leave less than once a second"
        assert not any(request.num_preemptions for request in late), "and keep their KV"


class TestAbort:
    @pytest.mark.parametrize("num_steps", [0, 1, 3])
    def test_at_any_time_everything_comes_back(self, num_steps):
        scheduler = make(chunk_size=4)
        request = make_request("a", 6)
        scheduler.add(request)
        for _ in range(num_steps):
            step(scheduler)
        assert scheduler.abort("a") is request
        assert request.finish_reason is FinishReason.CANCELLED
        assert used_blocks(scheduler) == 0
        assert scheduler.check() == []
        assert scheduler.schedule() is None

    def test_unknown_and_finished_requests_are_none(self):
        scheduler = make()
        scheduler.add(make_request("a", max_tokens=1))
        step(scheduler)
        assert scheduler.abort("a") is None
        assert scheduler.abort("never seen") is None

    def test_during_a_step_the_blocks_stay_until_the_step_is_over(self):
        scheduler = make()
        request = make_request("a", 6)
        scheduler.add(request)
        batch = scheduler.schedule()
        scheduler.abort("a")
        assert used_blocks(scheduler) == 2
        assert scheduler.check() == []
        assert scheduler.update(batch, [plain(7)]) == [RequestUpdate(request, (), finished=True)]
        assert request.output_token_ids == []
        assert used_blocks(scheduler) == 0
        assert scheduler.check() == []

    def test_steps_do_not_overlap(self):
        scheduler = make()
        scheduler.add(make_request("a"))
        batch = scheduler.schedule()
        with pytest.raises(InvariantError, match="last batch"):
            scheduler.schedule()
        scheduler.update(batch, [plain(7)])
        with pytest.raises(InvariantError, match="in flight"):
            scheduler.update(batch, [plain(7)])


class TestDisaggregation:
    def test_a_reservation_asks_only_for_what_is_not_cached(self):
        scheduler = make()
        scheduler.add(make_request("warm", 9, base=500))
        step(scheduler)
        request = make_request("a", 18, base=500)
        reservation = scheduler.reserve(request)
        assert reservation.num_cached_tokens == request.num_cached_tokens == 8
        assert reservation.wanted_blocks == ((2, 3, 4),)
        assert len(reservation.block_ids[0]) == 5
        assert request.status is RequestStatus.WAITING_FOR_KV
        assert scheduler.counts().waiting_for_kv == 1
        assert "a" not in [s.request.request_id for s in step(scheduler)[0].sequences]

    def test_an_adopted_request_decodes_at_once(self):
        scheduler = make()
        request = make_request("a", 8)
        scheduler.reserve(request)
        assert scheduler.adopt(request, 8, (42,)) == RequestUpdate(request, (42,), finished=False)
        assert shape(step(scheduler)[0]) == [("a", 8, 1, True)]
        assert (
            scheduler.reserve(make_request("b", 9, base=request.prompt_token_ids[0])).num_cached_tokens == 8
        )

    def test_a_first_token_that_ends_the_text_ends_the_request(self):
        scheduler = make()
        request = make_request("a", 8)
        scheduler.reserve(request)
        assert scheduler.adopt(request, 8, (EOS,)).finished
        assert used_blocks(scheduler) == 0
        assert scheduler.check() == []

    @pytest.mark.parametrize(("arrived", "expected"), [(0, (0, 8)), (4, (4, 4)), (8, (7, 1))])
    def test_after_a_failed_transfer_the_rest_is_computed_here(self, arrived, expected):
        scheduler = make()
        request = make_request("a", 8)
        scheduler.reserve(request)
        assert scheduler.adopt(request, arrived, None) is None
        assert scheduler.check() == []
        assert shape(step(scheduler)[0]) == [("a", *expected, True)]

    def test_without_blocks_there_is_no_reservation_and_no_trace(self):
        scheduler = make(num_blocks=4)
        first, second = make_request("a", 10, max_tokens=2), make_request("b", 10, max_tokens=2)
        assert scheduler.reserve(first) is not None
        assert scheduler.reserve(second) is None
        assert scheduler.check() == []
        scheduler.abort("a")
        assert scheduler.reserve(second) is not None

    def test_an_aborted_reservation_leaves_its_blocks_to_the_writer(self):
        scheduler = make()
        request = make_request("a", 8)
        reservation = scheduler.reserve(request)
        writer = scheduler._blocks.hold(reservation.block_ids[0])
        scheduler.abort("a")
        assert used_blocks(scheduler) == 2
        scheduler._blocks.release(writer)
        assert used_blocks(scheduler) == 0
        with pytest.raises(InvariantError, match="no reservation"):
            scheduler.adopt(request, 8, (1,))

    def test_a_first_token_without_all_kv_is_a_bug(self):
        scheduler = make()
        request = make_request("a", 8)
        scheduler.reserve(request)
        with pytest.raises(InvariantError, match="without all of its KV"):
            scheduler.adopt(request, 4, (1,))

    def test_adopted_requests_wait_for_a_place_in_order_of_arrival(self):
        scheduler = make(max_batch=1)
        scheduler.add(make_request("running", max_tokens=2))
        step(scheduler)
        older, younger = make_request("older", 8), make_request("younger", 8)
        scheduler.reserve(older)
        scheduler.reserve(younger)
        scheduler.adopt(younger, 8, (1,))
        scheduler.adopt(older, 8, (1,))
        assert scheduler.counts().waiting == 2
        step(scheduler)
        assert shape(step(scheduler)[0]) == [("older", 8, 1, True)]

    def test_new_reservations_hold_back_while_an_older_request_lacks_blocks(self):
        scheduler = make(num_blocks=8)
        scheduler.add(make_request("running", 8, max_tokens=4))
        step(scheduler)
        big, small = make_request("big", 24, max_tokens=4), make_request("small", 4, max_tokens=4)
        scheduler.add(big)
        step(scheduler)
        assert scheduler.reserve(small) is None
        scheduler.abort("big")
        assert scheduler.reserve(small) is not None
