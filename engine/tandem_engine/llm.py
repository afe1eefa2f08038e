"""Runs the engine in one process, without pods: the reference that served results are compared with.

llm = LLM(folder)
for completion in llm.generate(["Once upon a time"], SamplingParams(temperature=0.0)): ...
for text in llm.stream("Once upon a time", SamplingParams()): ...
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tandem_core.model.conversation import Message
from tandem_core.model.detokenizer import StreamingDetokenizer
from tandem_core.prefix_hash import cache_salt
from tandem_core.sampling import FinishReason, PromptLogprobs, SamplingParams, TokenLogprobs

from tandem_engine.assemble import EngineConfig, assemble
from tandem_engine.beam_search import Hypothesis
from tandem_engine.draft_source import DraftSource
from tandem_engine.engine import StepOutput
from tandem_engine.prompt_scores import PromptScores
from tandem_engine.request import Request
from tandem_engine.scheduler import text_end

Prompt = str | Sequence[int]


@dataclass
class CompletionStats:
    """Times in seconds since the request was added."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft_s: float = 0.0
    e2e_s: float = 0.0
    decode_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0


@dataclass
class Completion:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    finish_reason: FinishReason | None = None
    #: The stop string, or the id of the token of stop_token_ids, that ended the text.
    stop_reason: str = ""
    stats: CompletionStats = field(default_factory=CompletionStats)


class LLM:
    """A model folder, loaded and ready. Raises ModelLoadError.

    drafter: where drafts come from; None: no drafts.
    """

    def __init__(self, model_dir: Path, *, drafter: DraftSource | None = None, **sizes: object) -> None:
        config = EngineConfig(model=Path(model_dir), **sizes)  # type: ignore[arg-type]
        self._parts = assemble(config, drafter)
        self.engine = self._parts.engine
        self.tokenizer = self._parts.tokenizer
        self.manifest = self._parts.manifest
        self._ids = itertools.count()
        #: Unfinished requests by id; concurrent streams share the engine.
        self._live: dict[str, _Run] = {}

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams]
    ) -> list[Completion]:
        """Completes all prompts together, in the order given; one SamplingParams serves all.

        Raises InvalidRequestError before anything is computed.
        """
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
        runs = [_Run(self._request(p, s), self) for p, s in zip(prompts, each, strict=True)]
        try:
            for run in runs:
                self._begin(run)
            while any(run.is_live for run in runs):
                self._step()
        finally:
            for run in runs:
                self._end(run)
        return [run.completion for run in runs]

    def beam_search(self, prompt: Prompt, sampling: SamplingParams) -> list[Completion]:
        """The texts that `sampling.beam_search` finds, the best first. Raises InvalidRequestError or
        CapacityError."""
        request = self.begin(prompt, sampling)
        found: tuple[Hypothesis, ...] = ()
        while not found:
            for output in self.engine.step():
                if output.request is request:
                    found = output.hypotheses
                elif output.request.request_id in self._live:
                    self._take(output)
        return [self._completion(request, one) for one in found]

    def begin(self, prompt: Prompt, sampling: SamplingParams) -> Request:
        """Creates a request for callers that step the engine themselves."""
        request = self._request(prompt, sampling)
        self.engine.add(request)
        return request

    def _completion(self, request: Request, found: Hypothesis) -> Completion:
        reason, stop_token_id = text_end(request, found.token_ids[-1])
        text = StreamingDetokenizer(self.tokenizer, request.sampling)
        return Completion(
            text.push(found.token_ids, ends=reason is FinishReason.STOP) + text.flush(),
            list(found.token_ids),
            list(found.logprobs),
            finish_reason=reason,
            stop_reason="" if stop_token_id is None else str(stop_token_id),
        )

    def stream(self, prompt: Prompt, sampling: SamplingParams) -> Generator[str, None, Completion]:
        """Yields text as it becomes final; returns the completion. Closing the iterator frees the request.

        Several iterators may be read in turn: the one that waits for text computes for all of them.
        """
        run = _Run(self._request(prompt, sampling), self)
        num_read = 0
        try:
            self._begin(run)
            while True:
                unread = run.completion.text[num_read:]
                if unread:
                    num_read += len(unread)
                    yield unread
                elif run.is_live:
                    self._step()
                else:
                    return run.completion
        finally:
            self._end(run)

    def chat(self, messages: Sequence[Message], sampling: SamplingParams) -> Completion:
        """Completes a conversation under the model's chat template."""
        return self.generate([self.tokenizer.encode_chat(messages)], sampling)[0]

    def _request(self, prompt: Prompt, sampling: SamplingParams) -> Request:
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        return Request(
            request_id=f"llm-{next(self._ids)}",
            prompt_token_ids=token_ids,
            sampling=sampling,
            cache_salt=cache_salt("", self.manifest.revision),
            eos_token_ids=self._parts.eos_token_ids,
            guide=self._parts.guide_state(sampling.guide),
            prompt_scores=PromptScores.wanted(token_ids, sampling),
        )

    def _begin(self, run: _Run) -> None:
        self.engine.add(run.request)
        self._live[run.request.request_id] = run

    def _step(self) -> None:
        """One engine step for all unfinished requests."""
        for output in self.engine.step():
            self._take(output)

    def _take(self, output: StepOutput) -> None:
        run = self._live[output.request.request_id]
        run.take(output)
        if not run.is_live:
            self._end(run)

    def _end(self, run: _Run) -> None:
        """Frees the request. A second call does nothing."""
        if self._live.pop(run.request.request_id, None) is not None:
            self.engine.abort(run.request.request_id)


class _Run:
    """An unfinished request and its completion so far."""

    def __init__(self, request: Request, llm: LLM) -> None:
        self.request = request
        self.completion = Completion()
        self._started = time.perf_counter()
        sampling = request.sampling
        self._text = StreamingDetokenizer(llm.tokenizer, sampling)

    @property
    def is_live(self) -> bool:
        return self.completion.finish_reason is None

    def take(self, output: StepOutput) -> None:
        if output.error is not None:
            raise output.error
        completion, stats = self.completion, self.completion.stats
        stats.e2e_s = time.perf_counter() - self._started
        if completion.token_ids:
            stats.decode_steps += 1
        else:
            stats.ttft_s = stats.e2e_s
            stats.prompt_tokens = self.request.num_prompt_tokens
            stats.cached_tokens = self.request.num_cached_tokens
        stats.preemptions = self.request.num_preemptions
        seen = self._text.num_tokens
        ends = output.finished and self.request.finish_reason is FinishReason.STOP
        text = self._text.push(output.token_ids, ends=ends)
        output = output.truncated(self._text.num_tokens - seen)
        stats.drafted_tokens += len(output.drafted_sources)
        stats.accepted_tokens += len(output.accepted_sources)
        completion.token_ids.extend(output.token_ids)
        completion.logprobs.extend(output.logprobs)
        completion.prompt_logprobs = completion.prompt_logprobs or output.prompt_logprobs
        if self._text.stopped is not None:
            completion.finish_reason, completion.stop_reason = FinishReason.STOP, self._text.stopped
        elif output.finished:
            text += self._text.flush()
            completion.finish_reason = self.request.finish_reason
            if self.request.stop_token_id is not None:
                completion.stop_reason = str(self.request.stop_token_id)
        completion.text += text
