"""The engine: runs one step after another over all requests.

A step, top to bottom:

    draft      every decoding sequence gets a tree of guesses, or none
    schedule   the scheduler picks sequences and blocks -> Batch
    execute    one forward pass over all of it -> logits
    verify     ancestral sampling through each tree -> emitted tokens and accepted paths
    compact    accepted nodes' KV moves to where plain decoding would have put it
    update     the scheduler advances its counters, finishes and frees
    learn      the drafter gets the emitted tokens and the logits

The engine knows no text, processes or network. It is not thread-safe: one thread calls it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tandem_core.errors import InvalidRequestError
from tandem_core.sampling import PromptLogprobs, SamplingParams, TokenLogprobs, check_token_ids
from torch import Tensor

from tandem_engine.batch import Batch, ScheduledSequence
from tandem_engine.beam_search import Hypothesis, num_candidates
from tandem_engine.block_manager import BlockManager, BlockUsage
from tandem_engine.draft_source import NUM_LIKELIEST, DraftSource, Emitted, Likeliest
from tandem_engine.draft_tree import MAX_TREE_NODES
from tandem_engine.prompt_scores import PromptScores
from tandem_engine.request import Request
from tandem_engine.runner import ModelRunner
from tandem_engine.sampling.device import read_back
from tandem_engine.sampling.prompt_logprobs import prompt_logprobs
from tandem_engine.sampling.verify import Verified, Verifier
from tandem_engine.scheduler import PromptWork, RequestCounts, RequestUpdate, Scheduler
from tandem_engine.step_times import DECODE_TERMS, StepTimes, TokensPerStep

#: Least number of prompt tokens of a step, regardless of other requests' objectives.
_LEAST_CHUNK = 32
#: Share of the time that objectives per token leave which drafts may use while prompts wait; unlike prompts,
#: drafts may be rejected.
_SHARE_WITH_PROMPTS = 0.5
#: Weight of the newest step in the mean time of a position with log probabilities.
_NEWEST_SCORE = 0.25
#: Limit of that time relative to a prompt token's, because a pause of the process must not slow down prompts.
_MAX_SCORE_WEIGHT = 8.0
#: Lengths in tokens of the synthetic prompts and outputs that measure step costs.
_MEASURED_PROMPTS, _MEASURED_OUTPUT = (64, 256), 6
#: Most likely tokens that each position of a synthetic prompt with log probabilities lists.
_MEASURED_TOP = 20
#: Sequences that then decode together, and the length of their prompts: the cost of a batch cannot be derived
#: from one sequence.
_MEASURED_BATCH, _MEASURED_BATCH_PROMPT = 8, 16


@dataclass(frozen=True)
class StepOutput:
    """The result of one step for one request."""

    request: Request
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    #: Sources of the guesses verified in this step, and of the accepted ones.
    drafted_sources: tuple[str, ...]
    accepted_sources: tuple[str, ...]
    finished: bool
    #: Position in the draft of each verified draft token.
    drafted_positions: tuple[int, ...] = ()
    #: Why the request ended without an answer.
    error: Exception | None = None
    #: Log probabilities of the prompt, if requested; with the first token.
    prompt_logprobs: PromptLogprobs | None = None
    #: The texts that a beam search found, the best first, when it has ended; its steps emit no tokens.
    hypotheses: tuple[Hypothesis, ...] = ()

    def truncated(self, num_tokens: int) -> StepOutput:
        """Only the first num_tokens tokens, for a text that a stop string ended."""
        if num_tokens >= len(self.token_ids):
            return self
        return replace(
            self,
            token_ids=self.token_ids[:num_tokens],
            logprobs=self.logprobs[:num_tokens],
            accepted_sources=self.accepted_sources[:num_tokens],
        )

    def split(self) -> list[StepOutput]:
        """One part per token; the last one tells whether the request has finished."""
        last = len(self.token_ids) - 1
        return [
            replace(
                self,
                token_ids=self.token_ids[i : i + 1],
                logprobs=self.logprobs[i : i + 1],
                accepted_sources=self.accepted_sources[i : i + 1],
                finished=self.finished and i == last,
                prompt_logprobs=self.prompt_logprobs if i == 0 else None,
            )
            for i in range(last + 1)
        ] or [self]


@dataclass(frozen=True)
class EngineSnapshot:
    """An engine's state between two steps, for any thread."""

    #: Monotonic seconds.
    taken: float
    blocks: BlockUsage
    requests: RequestCounts
    prompts: tuple[PromptWork, ...]
    #: Broken invariants that the last check found.
    violations: tuple[str, ...]


class Engine:
    """Continuous batching with tree speculation over one model.

    layer_listener(batch, layer) is called inside a step when the KV of a layer is complete; the prefill pod
    sends it then.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        verifier: Verifier,
        blocks: BlockManager,
        *,
        vocab_size: int,
        drafter: DraftSource | None = None,
        max_draft_nodes: int = 8,
        layer_listener: Callable[[Batch, int], None] | None = None,
    ) -> None:
        self.scheduler = scheduler
        #: For transfers, which hold blocks together with the requests that own them.
        self.blocks = blocks
        self.num_steps = 0
        #: Times of steps that only decode, with drafts; their "tokens" are sequences, "pairs" cached tokens.
        self.decode_times = StepTimes(DECODE_TERMS)
        #: Times of steps that compute prompts.
        self.prefill_times = StepTimes()
        #: Seconds that a step takes longer per position of a prompt whose log probabilities it computes.
        self._score_s = 0.0
        self.tokens_per_step = TokensPerStep()
        #: The end of the last step, if there was work for another one.
        self._went_on_at: float | None = None
        self._work_done = 0
        #: Requests whose work is under way.
        self._under_way: frozenset[str] = frozenset()
        self._violations: tuple[str, ...] = ()
        self._runner = runner
        self._verifier = verifier
        self._vocab_size = vocab_size
        self._drafter = drafter
        self._max_draft_nodes = min(max_draft_nodes, MAX_TREE_NODES - 1)
        self.layer_listener = layer_listener

    def measure_costs(self, *, decodes: bool, slowed_by: float = 1.0) -> None:
        """Runs synthetic prompts to measure step costs before the first request, and to touch memory. Takes
        seconds with a large model. `slowed_by`: factor by which steps will be slower under load."""
        config, blocks = self.scheduler.config, self.blocks
        drafter, self._drafter = self._drafter, None
        caches, blocks.enable_prefix_caching = blocks.enable_prefix_caching, False
        num_output = _MEASURED_OUTPUT if decodes else 1
        most = min(config.max_model_len, blocks.max_tokens()) - num_output
        for num_tokens in _MEASURED_PROMPTS:
            # Keeps only the last prompt's times, because the first one touched the memory.
            self.prefill_times, self.decode_times = StepTimes(), StepTimes(DECODE_TERMS)
            for part in (num_tokens, num_tokens // 4):
                self._compute([max(1, min(part, most))], num_output)
        if decodes and most >= _MEASURED_BATCH * (_MEASURED_BATCH_PROMPT + num_output):
            self._compute([_MEASURED_BATCH_PROMPT] * min(_MEASURED_BATCH, config.max_batch), num_output)
        if decodes:  # prefill pods compute no log probabilities
            self._compute([max(2, min(_MEASURED_PROMPTS[0], most))], 1, num_top=_MEASURED_TOP)
        self._drafter, blocks.enable_prefix_caching = drafter, caches
        for times in (self.prefill_times, self.decode_times):
            times.expect_load(slowed_by)
        # Discards the tokens per step, because these sequences had no drafts.
        self.tokens_per_step = TokensPerStep()

    def _compute(self, prompt_lengths: Sequence[int], num_output: int, num_top: int | None = None) -> None:
        """Runs synthetic requests until all have ended. num_top: of the prompts' log probabilities; None: no
        log probabilities."""
        sampling = SamplingParams(
            temperature=0.0, max_tokens=num_output, ignore_eos=True, prompt_logprobs=num_top
        )
        for index, num_tokens in enumerate(prompt_lengths):
            prompt = [0] * num_tokens
            scores = PromptScores.wanted(prompt, sampling)
            self.add(Request(f"costs-{index}", prompt, sampling, prompt_scores=scores))
        while self.has_work():
            self.step()

    def check_tokens(self, request: Request) -> None:
        """Raises InvalidRequestError when a token id lies outside the vocabulary, or a logits processor is
        unknown."""
        check_token_ids("prompt_token_ids", request.prompt_token_ids, self._vocab_size)
        check_token_ids("output_token_ids", request.output_token_ids, self._vocab_size)
        request.sampling.check_vocabulary(self._vocab_size)
        beams = request.sampling.beam_search
        if beams is not None and self._runner.decoder.is_recurrent:
            raise InvalidRequestError(
                "beam_width",
                "this model has recurrent layers, of which beams cannot share the state; ask for none",
            )
        if beams is not None:
            count = num_candidates(beams.width, len(request.end_token_ids))
            if count > self._vocab_size:
                raise InvalidRequestError(
                    "beam_width",
                    f"{beams.width} with {len(request.end_token_ids)} end tokens compares {count} tokens, "
                    f"more than the vocabulary's {self._vocab_size}; ask for fewer beams or stop_token_ids",
                )
        self._verifier.custom.check(request.sampling.logits_processors)

    def add(self, request: Request) -> None:
        """Queues a request. Raises InvalidRequestError or CapacityError, before it allocates anything."""
        self.check_tokens(request)
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """Ends a request and frees what it holds; unknown ids are ignored (it may just have finished)."""
        self.scheduler.abort(request_id)
        if self._drafter is not None:
            self._drafter.forget(request_id)

    def check(self) -> None:
        """Checks all invariants; snapshots have what is broken."""
        self._violations = tuple(self.scheduler.check())

    def snapshot(self) -> EngineSnapshot:
        scheduler = self.scheduler
        return EngineSnapshot(
            time.monotonic(),
            self.blocks.usage(),
            scheduler.counts(),
            scheduler.prompt_work(),
            self._violations,
        )

    def work_done(self) -> int:
        """Changes while a step goes on outside of the model; any thread may ask."""
        return self._work_done + self._verifier.work_done

    def is_under_way(self, request_id: str) -> bool:
        """Whether the work that a step does now is, or may be, this request's; any thread may ask."""
        verified = self._verifier.verified_request_id
        return request_id == verified if verified else request_id in self._under_way

    @property
    def executor(self) -> str:
        """What computes the model."""
        return self._runner.decoder.executor

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def rest(self) -> None:
        """There is no work, so the time until the next step is not that of a step."""
        self._went_on_at = None

    def step(self) -> list[StepOutput]:
        """Runs one step; empty when nothing could be scheduled or only prompt chunks were computed."""
        # What lies between two steps, such as handing out tokens, delays the next tokens as much as a step.
        began, self._went_on_at = self._went_on_at or time.perf_counter(), None
        self._draft()
        self._work_done += 1
        drafted = time.perf_counter()
        batch = self.scheduler.schedule(self._max_prompt_tokens(), self._score_weight(), now=time.monotonic())
        if batch is None:
            return []
        self._under_way = frozenset([s.request.request_id for s in batch.sequences])
        for sequence in batch.sequences:
            if sequence.request.first_scheduled_ns is None:
                sequence.request.first_scheduled_ns = time.monotonic_ns()
        num_scored = sum([len(s.scored_positions) for s in batch.sequences])
        listener = self.layer_listener
        self._verifier.mask_workers.start(batch)
        computed = self._runner.execute(
            batch,
            (lambda layer: listener(batch, layer)) if listener is not None else None,
            self._score_prompt,
        )
        logits, results = computed.values, None
        if logits.device.type != "cpu" and batch.num_logits_rows:
            sampling = [s for s in batch.sequences if s.samples]
            results = read_back(sampling, logits, NUM_LIKELIEST if self._drafter is not None else 0)
        verified = self._verifier.verify(batch, logits, results, computed.most_likely)
        self._runner.compact(batch, [v.path for v in verified], self.blocks.states)
        self._work_done += 1
        for sequence, seen in zip([s for s in batch.sequences if s.samples], verified, strict=True):
            if seen.error is not None:
                self.scheduler.abort(sequence.request.request_id)
        updates = self.scheduler.update(batch, verified)
        outputs = self._outputs(batch, verified, updates)
        ended = time.perf_counter()
        self._account(batch, outputs, num_scored, ended - began, ended - drafted)
        if self.has_work():
            self._went_on_at = ended
        likeliest = results.likeliest if results is not None else None
        self._learn(batch, verified, updates, likeliest or logits)
        self._under_way = frozenset()
        return outputs

    def adopted(self, update: RequestUpdate) -> StepOutput:
        """Accounts for a first token that came from a prefill pod, as if a step here had made it."""
        if self._drafter is not None and update.finished:
            self._drafter.forget(update.request.request_id)
        return StepOutput(update.request, update.new_token_ids, (), (), (), update.finished)

    def _max_prompt_tokens(self) -> int | None:
        """Prompt tokens with which the next step keeps the tightest objective per token of the decoding
        sequences even if no draft token is accepted; at least _LEAST_CHUNK. None: no objective."""
        decoding = self.scheduler.decoding()
        tightest = _tightest_token_s(decoding)
        if tightest == math.inf:
            return None
        cost = self.prefill_times.cost()
        if not cost.per_token:
            return None
        num_rows = sum([1 + (len(r.draft) if r.draft is not None else 0) for r in decoding])
        return max(_LEAST_CHUNK, int((tightest - cost.per_step) / cost.per_token) - num_rows)

    def _score_weight(self) -> float:
        """Time of a prompt token with log probabilities, relative to one without."""
        cost = self.prefill_times.cost()
        return min(1.0 + self._score_s / cost.per_token, _MAX_SCORE_WEIGHT) if cost.per_token else 1.0

    def _draft(self) -> None:
        decoding = []
        for request in self.scheduler.decoding():
            if request.masks is not None:
                request.draft = request.masks.draft
            elif not request.waits_for_guide:
                decoding.append(request)
        if self._drafter is None or not decoding:
            return
        has_limit = _tightest_token_s(decoding) < math.inf
        share = _SHARE_WITH_PROMPTS if has_limit and self.scheduler.prompt_work() else 1.0
        trees = self._drafter.propose(decoding, self._max_draft_nodes, share)
        for request, tree in zip(decoding, trees, strict=True):
            request.draft = tree

    def _score_prompt(self, sequence: ScheduledSequence, first: int, logits: Tensor) -> None:
        """Adds the prompt's log probabilities under the logits [n, V] of positions first, first + 1, ..."""
        self._work_done += 1
        request, scores = sequence.request, sequence.request.prompt_scores
        if scores is None or scores.error is not None:
            return
        next_ids = request.prompt_token_ids[first + 1 : first + 1 + len(logits)]
        try:
            scores.add(first, prompt_logprobs(logits, next_ids, scores.num_top))
        except Exception as error:
            scores.fail(error)

    def _outputs(
        self, batch: Batch, verified: Sequence[Verified], updates: Sequence[RequestUpdate]
    ) -> list[StepOutput]:
        outputs = []
        sampling = [s for s in batch.sequences if s.samples]
        for sequence, seen, done in zip(sampling, verified, updates, strict=True):
            if sequence.beam > 0 or not (seen.token_ids or done.finished):
                continue
            n = len(done.new_token_ids)
            draft = sequence.draft
            outputs.append(
                StepOutput(
                    done.request,
                    done.new_token_ids,
                    seen.logprobs[:n],
                    draft.sources if draft is not None else (),
                    seen.accepted_sources[:n],
                    done.finished,
                    tuple([depth - 1 for depth in draft.depths()[1:]]) if draft is not None else (),
                    seen.error,
                    _delivered_scores(done),
                    _hypotheses(done),
                )
            )
        return outputs

    def _learn(
        self,
        batch: Batch,
        verified: Sequence[Verified],
        updates: Sequence[RequestUpdate],
        logits: Tensor | Likeliest,
    ) -> None:
        """Gives the drafter the emitted tokens, and the logits or what a device found in them."""
        if self._drafter is None:
            return
        emitted: list[Emitted] = []
        first_row = 0
        sampling = [s for s in batch.sequences if s.samples]
        for sequence, seen, done in zip(sampling, verified, updates, strict=True):
            rows = [first_row + node for node in seen.path[: len(done.new_token_ids)]]
            if done.request.search is None and seen.token_ids:
                emitted.append(Emitted(done.request, done.new_token_ids, rows))
            first_row += sequence.num_logits_rows
        if emitted:
            self._drafter.extend(emitted, logits)
        for done in updates:
            if done.finished:
                self._drafter.forget(done.request.request_id)

    def _account(
        self,
        batch: Batch,
        outputs: Sequence[StepOutput],
        num_scored: int,
        turn_s: float,
        step_s: float,
    ) -> None:
        """turn_s: since the step before, or since there was work; step_s: without drafting and what lay
        between the steps."""
        self.num_steps += 1
        sequences = batch.sequences
        drafted = sum([len(s.draft) for s in sequences if s.draft is not None])
        if batch.num_tokens == len(sequences) + drafted and all(s.samples for s in sequences):
            context = sum([s.start for s in sequences])
            self.decode_times.observe(len(sequences), context, turn_s)
            # A beam gains one token, whatever drafts bring to others.
            plain = [output for output in outputs if output.request.search is None]
            if plain:
                gained = sum([len(output.token_ids) for output in plain]) / len(plain)
                self.tokens_per_step.observe(len(sequences), gained)
            if self._drafter is not None:
                self._drafter.observe_step(len(sequences), context, drafted, step_s)
            return
        pairs = sum([s.num_new_tokens * (2 * s.start + s.num_new_tokens) for s in sequences]) // 2
        if not num_scored:
            self.prefill_times.observe(batch.num_tokens, pairs, turn_s)
        elif (cost := self.prefill_times.cost()).is_known:
            score_s = max(turn_s - cost.seconds(1, batch.num_tokens, pairs), 0.0) / num_scored
            self._score_s += (score_s - self._score_s) * (_NEWEST_SCORE if self._score_s else 1.0)


def _tightest_token_s(requests: Sequence[Request]) -> float:
    return min([request.token_s for request in requests if request.token_s], default=math.inf)


def _delivered_scores(done: RequestUpdate) -> PromptLogprobs | None:
    """The prompt's log probabilities, if they are wanted: once, with the first token."""
    scores = done.request.prompt_scores
    if scores is None or not done.new_token_ids:
        return None
    done.request.prompt_scores = None
    return scores.result()


def _hypotheses(done: RequestUpdate) -> tuple[Hypothesis, ...]:
    search = done.request.search
    return search.hypotheses() if search is not None and search.is_done else ()
