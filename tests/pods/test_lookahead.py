"""What real pods report to a real lookahead service."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

from redis_servers import RedisServer
from served_fleet import served
from tandem_lookahead.main import LookaheadPod
from tandem_lookahead.settings import LookaheadSettings
from toy_models import prompt_of
from waiting import until

GREEDY = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}


async def test_the_choices_of_one_call_count_as_one_request(tiny_model: Path, tmp_path: Path) -> None:
    """Equal texts of `n` choices, or of equal prompts of one call, are shared after a second call only."""
    async with AsyncExitStack() as stack:
        redis = RedisServer(tmp_path / "redis")
        await redis.start()
        stack.push_async_callback(redis.stop)
        lookahead = LookaheadPod(
            LookaheadSettings(port=0, redis_url=redis.url, drain_s=2.0, pod_id="la", min_requests=2)
        )
        await lookahead.start()
        stack.push_async_callback(lookahead.close)
        stack.push_async_callback(lookahead.server.stop)

        def value(name: str) -> float:
            return lookahead.server.registry.get_sample_value(f"tandem_lookahead_{name}") or 0.0

        target = f"127.0.0.1:{lookahead.server.port}"
        _, client = await stack.enter_async_context(served(tiny_model, lookahead=target, speculation="chain"))
        for number, fields in enumerate(
            ({"prompt": prompt_of(40), "n": 3}, {"prompt": [prompt_of(40, 5)] * 3}), start=1
        ):
            merged, shared = value("tokens_merged_total"), value("corpus_shared_tokens")
            await client.post("/v1/completions", json={**GREEDY, **fields})
            await until(lambda before=merged: value("tokens_merged_total") >= before + 24)
            other = {**GREEDY, "prompt": prompt_of(40, 100 + number)}  # reported after all choices
            await client.post("/v1/completions", json=other)
            await until(lambda before=merged: value("tokens_merged_total") >= before + 48)
            assert value("corpus_shared_tokens") == shared
            await client.post("/v1/completions", json={**GREEDY, **fields})
            await until(lambda before=merged: value("tokens_merged_total") >= before + 72)
            assert value("corpus_shared_tokens") > shared
