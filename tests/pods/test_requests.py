"""What the messages of a request say to a pod."""

import math
import time

import grpc
import pytest
from pod_fleet import request, run_fleet
from tandem_core.errors import InvalidRequestError
from tandem_core.guide import Guide
from tandem_engine.assemble import EngineParts
from tandem_engine.guided import GuideState
from tandem_pod.requests import due_at, end_due_at, token_objective
from tandem_proto.v1 import decode_pb2, prefill_pb2


@pytest.mark.parametrize(
    ("sent", "seconds"),
    [(None, 60), (1.5, 1.5), (-3.0, -3.0), (math.nan, 0), (math.inf, 86_400), (-math.inf, -86_400)],
)
def test_a_deadline_is_always_a_number(sent, seconds):
    fields = {} if sent is None else {"due_seconds": sent}
    for message in (decode_pb2.DecodeRequest(**fields), prefill_pb2.PrefillRequest(**fields)):
        assert due_at(message) - time.monotonic() == pytest.approx(seconds, abs=0.5)


@pytest.mark.parametrize(
    ("sent", "seconds"),
    [(None, math.inf), (1.5, 1.5), (100.0, 95.0), (-3.0, -3.0), (math.nan, 0), (math.inf, 86_400)],
)
def test_the_deadline_of_the_last_token_is_a_number_or_never(sent, seconds):
    message = decode_pb2.DecodeRequest() if sent is None else decode_pb2.DecodeRequest(end_seconds=sent)
    assert end_due_at(message) - time.monotonic() == pytest.approx(seconds, abs=0.5)


@pytest.mark.parametrize(
    ("sent", "seconds"), [(0.0, 0), (0.15, 0.15), (-1.0, 0), (math.nan, 0), (math.inf, 86_400)]
)
def test_an_objective_per_token_is_always_a_number(sent, seconds):
    message = decode_pb2.DecodeRequest(token_seconds=sent)
    assert token_objective(message) == pytest.approx(seconds)


async def test_a_pod_that_compiles_a_guide_is_not_silent(tiny_model, monkeypatch):
    """Guides of one tenant that waited for a thread made a pod unusable for all."""

    def slow(parts: EngineParts, guide: Guide | None) -> GuideState | None:
        time.sleep(1.0)
        raise InvalidRequestError("guide", "cannot be used")

    monkeypatch.setattr(EngineParts, "guide_state", slow)
    async with run_fleet(tiny_model) as fleet:
        decoded = request("r", [5], [], max_tokens=2)
        decoded.sampling.guide.regex, decoded.sampling.ignore_eos = "a", False
        ticket = prefill_pb2.KvTicket(layout_fingerprint=fleet.layout.fingerprint)
        prefilled = prefill_pb2.PrefillRequest(
            request_id="r", prompt_token_ids=[5], sampling=decoded.sampling, ticket=ticket
        )
        for call in (fleet.decode.Decode(decoded), fleet.prefill.Prefill(prefilled)):
            told: list[str] = []
            with pytest.raises(grpc.aio.AioRpcError, match="cannot be used"):
                async for response in call:
                    told += [response.WhichOneof("event")]
            assert len(told) >= 2
            assert set(told) == {"progress"}
        await fleet.assert_idle()
