"""docs/memory.md names a bound and a test for all that callers can make grow; what it says of the structures
below holds for hostile input."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from resident_memory import in_own_process, resident_bytes
from tandem_core.model.piece_cache import PieceCache
from tandem_core.sampling import SamplingParams
from tandem_core.slo import DEFAULT_SLO_CLASSES
from tandem_drafting.mirror import BYTES_PER_TOKEN, GlobalMirror
from tandem_drafting.spans import AcceptedSpan
from tandem_gateway.admission.admitted import Admitted
from tandem_gateway.admission.queue import MAX_QUEUED_TOKENS, Queue
from tandem_gateway.answers.answer import Answer
from tandem_gateway.answers.kept_answers import KeptAnswers
from tandem_gateway.dashboard.ended import EndedRequests
from tandem_gateway.errors import Outcome
from tandem_gateway.fleet.output_lengths import OutputLengths
from tandem_gateway.fleet.prefix_index import PrefixIndex
from tandem_gateway.request import TokenizedRequest
from tandem_proto.v1 import answers_pb2, common_pb2, decode_pb2

ROOT = Path(__file__).resolve().parents[2]
THIS = "tests/repo/test_memory_page.py"
MIB = 1 << 20


def rows() -> dict[str, list[str]]:
    """Cells of the table by their row's name, without headings."""
    table = [
        [cell.strip() for cell in line.strip("|\n").split("|")]
        for line in (ROOT / "docs/memory.md").read_text().splitlines()
        if line.startswith("| ") and "**" not in line
    ]
    return {name: cells for name, *cells in table[1:]}


def a_request(number: int, num_tokens: int) -> TokenizedRequest:
    now = time.monotonic()
    prompt = tuple(range(1000 + number, 1000 + number + num_tokens))
    return TokenizedRequest(
        f"r{number}", f"t{number % 7}", prompt, SamplingParams(), DEFAULT_SLO_CLASSES["chat"], now, now + 60
    )


def kept_answers() -> tuple[object, int]:
    """Many tenants, short answers, log probabilities, keys, prompts and their log probabilities."""
    kept = KeptAnswers(ttl_s=60.0, max_bytes=16 * MIB, tenant_bytes=8 * MIB)
    token = common_pb2.TokenLogprob(token_id=7, logprob=-0.5, token_bytes=b" word")
    scores = common_pb2.PromptLogprobs(logprobs=[-0.5] * 9000, ranks=[3] * 9000)
    events = (
        [decode_pb2.DecodeChunk(text="\U0001f600", token_ids=[7])],
        [decode_pb2.DecodeChunk(token_ids=[7], logprobs=[common_pb2.PositionLogprobs(top=[token] * 20)])]
        * 200,
        [decode_pb2.DecodeChunk(token_ids=[7], prompt_logprobs=scores)],
    )
    for number in range(6000):
        tenant = f"t{number % 7}"
        if kept.has_room(tenant):
            request = decode_pb2.DecodeRequest(tenant=tenant, prompt_token_ids=[40_000] * (number % 900))
            record = answers_pb2.AnswerRecord(id=f"{number:024x}", request=request)
            answer = Answer(record, None, is_kept=True, has_key=number % 3 == 0)
            kept.add(answer)
            for event in events[number % len(events)]:
                answer.add(event)
            kept.count(answer)
        kept.remove_excess()
    return kept, 16 * MIB


def prefix_index() -> tuple[object, int]:
    index = PrefixIndex(max_blocks_per_pod=65_536, max_blocks=65_536)
    for number in range(150):
        index.add(f"pod-{number % 48}", [os.urandom(16) for _ in range(1000)])
    return index, 65_536 * 160


def answer_lengths() -> tuple[object, int]:
    lengths = OutputLengths()
    for number, _ in itertools.product(range(6000), range(2)):
        lengths.observe(a_request(number, 70), 100)
    return lengths, 5 * MIB


def pieces() -> tuple[object, int]:
    cache = PieceCache()
    for number in range(3000):
        piece = f"{number}" + "\U0001f600" * 1000
        cache.ids(f"t{number % 7}", piece, lambda text: range(len(text)))
    return cache, 12 * MIB


def ended_requests() -> tuple[object, int]:
    ended = EndedRequests()
    for number in range(1200):
        ended.add(a_request(number, 8000), Outcome.REFUSED, None, was_admitted=False, refusal="x" * 1000)
    return ended, 6 * MIB


def requests_in_the_queue() -> tuple[object, int]:
    """An eighth of the prompt tokens that may wait, as requests and as the records of their answers."""

    async def fill() -> list[object]:
        held: list[object] = [queue := Queue(max_in_flight=1, max_queue=1024, num_batch_slots=lambda: 1)]
        for number in range(128):
            request = a_request(number * 8192, MAX_QUEUED_TOKENS // 1024)
            request.block_hashes(64)
            queue.wait(Admitted(request))
            record = decode_pb2.DecodeRequest(prompt_token_ids=request.prompt_token_ids)
            held.append(answers_pb2.AnswerRecord(request=record))
        return held

    return asyncio.run(fill()), 52 * MIB


def copies_of_shared_text() -> tuple[object, int]:
    mirror = GlobalMirror(max_tokens=200_000)
    for number in range(500):
        text = tuple((number * 7919 + i * i) % 50_000 for i in range(1000))
        mirror.apply_delta([AcceptedSpan(f"r{number}", 0, text)], "1")
    return mirror, 200_000 * BYTES_PER_TOKEN


FILLS: dict[str, Callable[[], tuple[object, int]]] = {
    "answers that can be resumed": kept_answers,
    "prefix index": prefix_index,
    "answer lengths by template": answer_lengths,
    "pieces of chats": pieces,
    "ended requests for the dashboard": ended_requests,
    "requests in the queue": requests_in_the_queue,
    "copies of shared text": copies_of_shared_text,
}


def growth(fill: Callable[[], tuple[object, int]]) -> tuple[int, int]:
    """Bytes that a structure holds after it was filled, and its bound."""
    before = resident_bytes()
    held, bound = fill()
    grown = resident_bytes() - before
    del held
    return grown, bound


def test_every_row_has_a_bound_and_a_test_that_exists() -> None:
    assert len(rows()) > 20
    for name, (bound, _, _, checked_by) in rows().items():
        assert bound, name
        assert re.fullmatch(r"`tests/\S+\.py`", checked_by), name
        assert (ROOT / checked_by.strip("`")).is_file(), name
    assert {name for name, cells in rows().items() if THIS in cells[-1]} == FILLS.keys()


@pytest.mark.parametrize("name", FILLS)
def test_hostile_input_stays_within_the_bound(name: str) -> None:
    """The margin is for the allocator's free pages and what the module loads."""
    grown, bound = in_own_process(growth, FILLS[name])
    assert grown < 1.5 * bound + 6 * MIB
