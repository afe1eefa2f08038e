"""A learner travels as bytes, and is not harmed by bytes of something else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tandem_core.sampling import SamplingParams
from tandem_decode.learnt import DrafterTables
from tandem_drafting.drafter import Drafter, DraftPolicy
from tandem_engine.draft_source import Emitted
from tandem_engine.request import Request

pytestmark = pytest.mark.drafts


def at_once(function: Callable[[], Any]) -> asyncio.Future[Any]:
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    try:
        future.set_result(function())
    except ValueError as error:
        future.set_exception(error)
    return future


def taught(tenant: str) -> Drafter:
    """A drafter that has seen one request of the tenant repeat itself."""
    drafter = Drafter(None, DraftPolicy())
    request = Request("r", [1, 2, 3, 4, 5] * 8, SamplingParams(max_tokens=500), tenant=tenant)
    request.num_computed_tokens = 40
    request.output_token_ids = [1]
    for token in [2, 3, 4, 5, 1] * 10:
        drafter.propose([request], 8)
        drafter.extend([Emitted(request, [token], ())])
        request.output_token_ids.append(token)
        request.num_computed_tokens += 1
    return drafter


async def test_a_new_pod_s_learner_becomes_the_one_that_was_sent():
    source = DrafterTables(taught("acme"), "acme", at_once)
    count, payload = await source.read()
    assert count > 0
    target = DrafterTables(Drafter(None, DraftPolicy()), "acme", at_once)
    assert target.format == source.format
    assert (await target.read())[0] == 0
    await target.load(payload)
    assert await target.read() == (count, payload)


async def test_tenants_have_learners_of_their_own():
    drafter = taught("acme")
    assert (await DrafterTables(drafter, "beta", at_once).read())[0] == 0


async def test_after_a_purge_nothing_learnt_of_the_tenant_is_left():
    drafter = taught("acme")
    kept = DrafterTables(drafter, "beta", at_once)
    await kept.load((await DrafterTables(taught("beta"), "beta", at_once).read())[1])
    tables = DrafterTables(drafter, "acme", at_once)
    await tables.forget()
    assert (await tables.read())[0] == 0
    assert (await kept.read())[0] > 0


async def test_other_bytes_change_nothing():
    tables = DrafterTables(taught("acme"), "acme", at_once)
    before = await tables.read()
    for payload in (b"", b"rubbish", before[1][:-1], before[1][:-1] + bytes([before[1][-1] ^ 1])):
        with pytest.raises(ValueError, match="tables"):
            await tables.load(payload)
    assert await tables.read() == before
