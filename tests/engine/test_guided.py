"""Guided texts: drafts are shaped by the guide and change no token, and the state follows the output."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
import toy_tokenizers
from tandem_core.errors import InvalidRequestError
from tandem_core.guide import Guide, GuideKind
from tandem_core.model.guides import GuideCompiler, OwnMatcher
from tandem_core.model.manifest import ModelManifest
from tandem_core.model.tokenizer import Tokenizer
from tandem_core.sampling import FinishReason, SamplingParams
from tandem_core.speculation import SpeculationMode
from tandem_drafting.drafter import Drafter, DraftPolicy
from tandem_engine import model_loader
from tandem_engine.draft_tree import DraftTree
from tandem_engine.guided import SOURCE, GuideState, Mask
from tandem_engine.llm import LLM, Completion
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SCHEMA = {
    "type": "object",
    "properties": {
        "order": {"type": "string", "pattern": "^#W[0-9]{7}$"},
        "reason": {"enum": ["damaged", "wrong size", "no longer needed"]},
        "items": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
        "note": {"type": ["string", "null"], "maxLength": 8},
    },
    "required": ["order", "reason", "items", "note"],
    "additionalProperties": False,
}
JSON = Guide(GuideKind.JSON_SCHEMA, json.dumps(SCHEMA))
GUIDES = (JSON, Guide(GuideKind.REGEX, "[a-f]{40}!{3}"), Guide.of_choices(["certainly", "certainly not"]))
SAMPLING = tuple(
    SamplingParams(max_tokens=120, guide=guide, seed=seed, **how)
    for seed, guide in enumerate(GUIDES)
    for how in (
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2, "logprobs": 2},
    )
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose tokenizer has all bytes and some merges."""
    texts = [
        json.dumps({"order": "#W1234567", "reason": "damaged", "items": [1, 2], "note": None}),
        "certainly",
    ]
    special = ["<unk>", "<s>", "</s>"]
    tokenizer = toy_tokenizers.trained(texts * 3, 352, special)
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=352, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=2,
        initializer_range=0.2,
    )  # fmt: skip
    checkpoint = tmp_path_factory.mktemp("checkpoints") / "guided"
    LlamaForCausalLM(config).save_pretrained(checkpoint)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(checkpoint)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANDEM_HOME", str(tmp_path_factory.mktemp("home")))
        return model_loader.pull(str(checkpoint))


def engine(folder: Path, mode: SpeculationMode = SpeculationMode.OFF) -> LLM:
    drafter = Drafter(None, DraftPolicy(mode=mode))
    return LLM(folder, drafter=drafter, num_blocks=128, block_size=16, threads=1, dtype="float32")


def complete(llm: LLM, params: Sequence[SamplingParams] = SAMPLING) -> list[Completion]:
    return llm.generate([[5 + n, 9, 7] for n in range(len(params))], params)


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[Completion]:
    """Each text of its own, without drafts."""
    llm = engine(folder)
    return [llm.generate([[5 + n, 9, 7]], params)[0] for n, params in enumerate(SAMPLING)]


def test_every_text_matches_its_guide(alone: list[Completion]) -> None:
    for params, completion in zip(SAMPLING, alone, strict=True):
        assert completion.finish_reason is FinishReason.STOP
        assert params.guide is not None
        if params.guide is JSON:
            jsonschema.validate(json.loads(completion.text), SCHEMA)
        else:
            assert set(completion.text) <= set("abcdef!") or completion.text in ("certainly", "certainly not")
    assert len({completion.text for completion in alone}) > len(GUIDES), "the model still chooses"


def test_drafts_and_batches_change_no_token_and_the_guide_drafts(
    folder: Path, alone: list[Completion]
) -> None:
    llm = engine(folder, SpeculationMode.LOCAL)
    together = complete(llm)
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert [c.logprobs for c in together] == [c.logprobs for c in alone]
    for completion, plain in zip(together[:3], alone[:3], strict=True):
        assert completion.stats.decode_steps < 0.8 * plain.stats.decode_steps, "keys and braces are drafted"


def test_nothing_is_drafted_with_speculation_off(alone: list[Completion]) -> None:
    assert all(completion.stats.drafted_tokens == 0 for completion in alone)


def test_a_text_that_is_cut_begins_as_the_whole_one(folder: Path, alone: list[Completion]) -> None:
    llm = engine(folder, SpeculationMode.LOCAL)
    cut = SamplingParams(max_tokens=9, guide=JSON, temperature=0.0)
    (completion,) = llm.generate([[5, 9, 7]], cut)
    assert completion.finish_reason is FinishReason.LENGTH
    assert completion.token_ids == alone[0].token_ids[:9]


def test_a_guide_overrules_biases_that_would_forbid_all_that_it_allows(folder: Path) -> None:
    llm = engine(folder)
    tokenizer = llm.tokenizer
    digits = tuple((tokenizer.encode(str(n), add_special_tokens=False)[0],) for n in range(10))
    params = SamplingParams(
        max_tokens=8, guide=Guide(GuideKind.REGEX, "[0-9]{4}"), temperature=0.0, bad_words=digits
    )
    (completion,) = llm.generate([[5]], params)
    assert completion.text.isdigit()
    assert len(completion.text) == 4


# -- the state alone ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled(folder: Path) -> tuple[Callable[[Guide], GuideState], Tokenizer]:
    compiler = GuideCompiler(folder, ModelManifest.read(folder))
    return lambda guide: GuideState(compiler, guide), Tokenizer(folder)


def tokens_of(mask: Mask | None) -> list[int] | None:
    """The tokens that a mask allows."""
    return None if mask is None else np.unpackbits(mask, count=352, bitorder="little").nonzero()[0].tolist()


def allowed(state: GuideState, text: list[int]) -> list[int] | None:
    return tokens_of(state.masks(text)[0])


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def test_forbidden_branches_go_and_forced_text_comes_first(
    compiled: tuple[Callable[[Guide], GuideState], Tokenizer],
) -> None:
    start, tokenizer = compiled
    state = start(Guide(GuideKind.REGEX, "x(a|b)c*"))
    x, a, b, c, d = (ids(tokenizer, letter)[0] for letter in "xabcd")
    # x -> a -> c, x -> d, d
    tree = DraftTree((x, a, c, d, d), (0, 1, 2, 1, 0), ("prompt",) * 5)
    drafted = state.draft([], tree, 8)
    assert drafted == DraftTree((x, a, c), (0, 1, 2), (SOURCE, "prompt", "prompt"))
    assert state.draft([], tree, 2) == DraftTree((x, a), (0, 1), (SOURCE, "prompt"))
    assert state.draft([], None, 8) == DraftTree((x,), (0,), (SOURCE,))
    assert state.draft([x], None, 8) is None, "the model chooses between a and b"
    tree = DraftTree((d, b), (0, 0), ("output", "output"))
    assert state.draft([x], tree, 8) == DraftTree((b,), (0,), ("output",))


def test_the_state_follows_the_output_forward_and_back(
    compiled: tuple[Callable[[Guide], GuideState], Tokenizer],
) -> None:
    start, tokenizer = compiled
    text = ids(tokenizer, "certainly not")
    state, fresh = start(GUIDES[2]), start(GUIDES[2])
    for length, token_id in enumerate(text):
        assert token_id in allowed(state, text[:length])
    assert allowed(state, text) == [2]
    for length in (len(text), 1, 0, 2, len(text)):
        assert allowed(state, text[:length]) == allowed(start(GUIDES[2]), text[:length])
    assert fresh.draft([*text, 2], None, 8) is None


def test_a_guide_without_any_text_is_an_error_of_the_request(
    folder: Path, compiled: tuple[Callable[[Guide], GuideState], Tokenizer]
) -> None:
    endless = Guide(GuideKind.LARK, "start: start start")
    with pytest.raises(InvalidRequestError, match="guide: cannot go on after 0 tokens: NoExtensionBias"):
        compiled[0](endless).masks([])
    with pytest.raises(InvalidRequestError, match="guide: cannot go on"):
        engine(folder).generate([[5]], SamplingParams(guide=endless))


def test_an_output_that_the_guide_forbids_is_an_error_of_the_request(
    compiled: tuple[Callable[[Guide], GuideState], Tokenizer],
) -> None:
    start, tokenizer = compiled
    state = start(GUIDES[2])
    text = ids(tokenizer, "nonsense")
    assert state.draft(text, None, 8) is None
    with pytest.raises(InvalidRequestError, match="guide: cannot go on after 7 tokens"):
        state.masks(text)


def test_masks_of_a_draft_are_those_of_its_texts(
    compiled: tuple[Callable[[Guide], GuideState], Tokenizer],
) -> None:
    start, tokenizer = compiled
    guide = Guide(GuideKind.REGEX, "x(a|b)c{0,2}")
    x, a, b, c, d = (ids(tokenizer, letter)[0] for letter in "xabcd")
    #                        1  2  3  4  5  6  7
    tree = DraftTree((a, c, b, d, c, 2, a), (0, 1, 0, 0, 3, 2, 6), ("prompt",) * 7)
    state = start(guide)
    masks = state.masks([x], tree, {2})
    for node, text in {0: "x", 1: "xa", 2: "xac", 3: "xb", 5: "xbc"}.items():
        assert tokens_of(masks[node]) == allowed(start(guide), [ids(tokenizer, letter)[0] for letter in text])
    assert masks[4] is None, "the guide forbids d"
    assert masks[6] is masks[7] is None, "the text ends"
    assert allowed(state, [x, b, c]) == allowed(start(guide), [x, b, c]), "the state is where it was"


class Matcher:
    """A matcher of any text whose masks take CPU time, or which fails at some of its masks."""

    def __init__(self, seconds: Sequence[float] = (), fails_at: Sequence[int] = ()) -> None:
        self._seconds = list(seconds)
        self._fails_at = fails_at
        self._num_masks = 0
        self.text: list[int] = []

    def compute_bitmask(self) -> bytes:
        until = time.thread_time() + (self._seconds[self._num_masks] if self._seconds else 0.0)
        while time.thread_time() < until:
            pass
        self._num_masks += 1
        return b"\xff" * 44

    def is_error(self) -> bool:
        return self._num_masks in self._fails_at

    is_stopped = is_error

    def get_error(self) -> str:
        return "too many states"

    def consume_token(self, token_id: int) -> None:
        self.text.append(token_id)

    def try_consume_tokens(self, token_ids: list[int]) -> int:
        if not self.is_error():
            self.text += token_ids
        return 0 if self.is_error() else len(token_ids)

    def validate_tokens(self, token_ids: list[int]) -> int:
        return len(token_ids)

    def rollback(self, count: int) -> None:
        del self.text[len(self.text) - count :]

    def compute_ff_tokens(self) -> list[int]:
        return [7] * 20


class Compiler:
    """Has one matcher per compilation."""

    def __init__(self, *matchers: Matcher) -> None:
        self._matchers = list(matchers)

    def matcher(self, guide: Guide) -> tuple[Matcher, threading.Lock]:
        return self._matchers.pop(0), threading.Lock()

    fresh_matcher = matcher


def num_masks_before_the_end(seconds: list[float]) -> int | None:
    """How many masks the guide gives before it takes too long; None: all."""
    state = GuideState(Compiler(Matcher(seconds)), JSON)
    for number in range(len(seconds)):
        try:
            state.masks([5] * number)
        except InvalidRequestError as error:
            assert "ms per token" in str(error)
            return number
    return None


def test_a_guide_whose_masks_take_long_on_average_ends() -> None:
    slow = num_masks_before_the_end([0.030] * 20)
    assert slow is not None
    assert slow < 8
    assert num_masks_before_the_end([0.060] + [0.001] * 40) is None, "the first mask may take longer"
    assert num_masks_before_the_end([0.300] + [0.001] * 40) is None, "as after a pause of the machine"
    assert num_masks_before_the_end([0.002] * 100) is None


def test_drafts_of_a_slow_guide_are_cut() -> None:
    state = GuideState(Compiler(Matcher([0.002] * 40)), JSON)
    tree = DraftTree((5,) * 12, tuple(range(12)), ("prompt",) * 12)
    masks = state.masks([], tree)
    assert 1 < sum(mask is not None for mask in masks) < 6
    assert len(state.draft([], tree, 12) or ()) < 6


def test_a_lexer_that_others_have_filled_is_replaced() -> None:
    full, empty = Matcher(fails_at=range(1, 99)), Matcher()
    state = GuideState(Compiler(full, empty), JSON)
    assert allowed(state, [5, 6]) == list(range(352))
    assert empty.text == [5, 6]
    with pytest.raises(InvalidRequestError, match="after 0 tokens: too many states"):
        GuideState(Compiler(full, Matcher(fails_at=[1])), JSON)
    state = GuideState(Compiler(Matcher(fails_at=[2]), Matcher(fails_at=[1])), JSON)
    with pytest.raises(InvalidRequestError, match="after 2 tokens: too many states"):
        state.masks([5, 6])


def test_a_guide_with_a_slow_first_mask_does_not_enter_the_engine() -> None:
    with pytest.raises(InvalidRequestError, match="ms per token"):
        GuideState(Compiler(Matcher(fails_at=[1]), Matcher([0.2])), JSON)


def test_a_guide_that_fails_in_a_draft_goes_on_without_drafts() -> None:
    tree = DraftTree((5, 6), (0, 1), ("prompt",) * 2)
    again = Matcher()
    state = GuideState(Compiler(Matcher(fails_at=range(3, 99)), again), JSON)
    first, *rest = state.masks([9], tree)
    assert tokens_of(first) == list(range(352))
    assert rest == [None, None]
    assert state.draft([9], tree, 8) is None
    assert allowed(state, [9, 5]) == list(range(352))
    assert again.text == [9, 5]


# -- slow guides in the engine ---------------------------------------------------------------------------


class Slowed:
    """A matcher whose masks, from the second on, wait until they may end."""

    def __init__(self, matcher: object, may_end: threading.Event) -> None:
        self._matcher = matcher
        self._may_end = may_end
        self._num_masks = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._matcher, name)

    def compute_bitmask(self) -> bytes:
        self._num_masks += 1
        if self._num_masks > 1:
            self._may_end.wait(timeout=60)
        return self._matcher.compute_bitmask()


@pytest.mark.parametrize("mode", [SpeculationMode.OFF, SpeculationMode.LOCAL])
def test_a_sequence_with_a_late_mask_skips_the_step_and_its_text_is_the_same(
    folder: Path, alone: list[Completion], monkeypatch: pytest.MonkeyPatch, mode: SpeculationMode
) -> None:
    llm, may_end = engine(folder, mode), threading.Event()
    compiler = llm._parts.guides
    compiled = compiler.matcher
    late = [number for number, params in enumerate(SAMPLING) if params.guide is GUIDES[1]]

    def matcher(guide: Guide) -> OwnMatcher:
        made, lock = compiled(guide)
        return OwnMatcher(Slowed(made, may_end) if guide is GUIDES[1] else made, lock)

    monkeypatch.setattr(compiler, "matcher", matcher)
    requests = [llm.begin([5 + n, 9, 7], params) for n, params in enumerate(SAMPLING)]
    plain = llm.begin([9, 8, 7], SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True))
    ended: dict[str, int] = {}
    held_up: list[float] = []
    while len(ended) < len(requests) + 1:
        began = time.monotonic()
        for output in llm.engine.step():
            assert output.error is None
            assert output.token_ids, "who sits out shows nothing"
            if output.finished:
                ended[output.request.request_id] = len(ended)
        held_up.append(time.monotonic() - began)
        if not may_end.is_set() and len(ended) == len(requests) + 1 - len(late):
            assert all(len(requests[n].output_token_ids) == 1 for n in late), (
                "the guide's first mask was there"
            )
            may_end.set()
    assert plain.request_id in ended
    assert sorted(held_up)[len(held_up) // 2] < 1, "the others do not wait for the late masks"
    assert [request.output_token_ids for request in requests] == [c.token_ids for c in alone]
    assert llm.engine.scheduler.check() == []


def test_a_request_that_skips_a_step_can_be_aborted_and_preempted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, may_end = engine(folder), threading.Event()
    compiler = llm._parts.guides
    compiled = compiler.matcher
    monkeypatch.setattr(
        compiler, "matcher", lambda guide: OwnMatcher(Slowed(compiled(guide)[0], may_end), threading.Lock())
    )
    stays, leaves = (llm.begin([5, 9, 7], SamplingParams(max_tokens=30, guide=JSON, seed=n)) for n in (1, 2))
    for _ in range(4):
        llm.engine.step()
    assert [len(r.output_token_ids) for r in (stays, leaves)] == [1, 1]
    llm.engine.abort(leaves.request_id)
    llm.engine.scheduler._queues._preempt(stays)
    may_end.set()
    while llm.engine.has_work():
        llm.engine.step()
    fresh = engine(folder).generate([[5, 9, 7]], SamplingParams(max_tokens=30, guide=JSON, seed=1))[0]
    assert stays.output_token_ids == fresh.token_ids
    assert llm.engine.scheduler.check() == []


def test_a_guide_that_was_slow_twice_gets_no_drafts_and_another_thread() -> None:
    state = GuideState(Compiler(Matcher([0.0, 0.02, 0.02] + [0.0] * 10)), JSON)
    assert state.draft([], None, 8) is not None
    assert [state.masks([5] * n) and state.is_slow for n in (1, 2, 3)] == [False, True, True]
    assert state.draft([5] * 3, None, 8) is None


def test_no_draft_waits_for_a_guide_that_is_busy() -> None:
    state = GuideState(Compiler(Matcher()), JSON)
    with state._lock:
        assert state.is_busy
        assert state.draft([], None, 8) is None
    assert state.draft([], None, 8) is not None
