"""The receipt's account of decoding, added up from steps that are known."""

from __future__ import annotations

from tandem_core.sampling import SamplingParams
from tandem_decode.receipt import RequestRecord
from tandem_engine.engine import StepOutput
from tandem_engine.request import Request


def test_steps_guesses_and_hits_are_counted_by_source() -> None:
    request = Request("r", [1, 2, 3], SamplingParams(seed=7))
    record = RequestRecord(request, "caller's", "d0")
    #: Tokens, guesses verified, sources of the accepted ones; the first comes of the prompt.
    steps: list[tuple[int, int, tuple[str, ...]]] = [
        (1, (), ()),
        (3, ("prompt",) * 5 + ("global",) * 3, ("prompt", "prompt")),
        (1, ("output",) * 8, ()),
        (4, ("output",) * 3 + ("global",) * 2, ("output", "global", "output")),
        (1, (), ()),
    ]
    for tokens, drafted, sources in steps:
        record.step(StepOutput(request, tuple(range(tokens)), (), drafted, sources, False))
    receipt = record.receipt()
    assert (receipt.output_tokens, receipt.decode_steps) == (10, 4)
    assert (receipt.drafted_tokens, receipt.accepted_tokens, receipt.hit_steps) == (21, 5, 2)
    assert dict(receipt.drafted_by_source) == {"prompt": 5, "output": 11, "global": 5}
    assert dict(receipt.accepted_by_source) == {"prompt": 2, "output": 2, "global": 1}
    assert dict(receipt.hit_steps_by_source) == {"prompt": 1, "output": 1, "global": 1}
    assert (receipt.drafts, list(receipt.accepted_at)) == (3, [2, 2, 1])
    assert (receipt.request_id, receipt.decode_pod, receipt.seed) == ("caller's", "d0", 7)
