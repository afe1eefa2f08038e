"""llama.cpp's own server, embedded by `xllamacpp`, on the GGUF file as it is.

    python -m peers.llama_cpp MODEL.gguf [--drafts]

Drafts come from its n-gram lookup, which needs no second model. Requests go over its HTTP endpoint on
loopback, whose stream names each token.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
from collections.abc import Generator
from pathlib import Path
from urllib.parse import urlsplit

import xllamacpp

from peers import streams
from peers.protocol import serve, take_stdout

#: Tokens to match and to draft. Its defaults (12, 48) hardly ever fire on dialogues: 1.03 tokens a step on
#: four of this benchmark's prompts, beside 1.57 with these.
_MATCH_TOKENS, _DRAFT_TOKENS = 2, 5
#: Sequences at once, and room for each: the longest prompt and a long answer.
_SLOTS, _SLOT_TOKENS = 4, 7168


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--drafts", action="store_true")
    options = parser.parse_args()
    replies = take_stdout()
    server = xllamacpp.Server(_parameters(options.model, options.drafts))
    address = urlsplit(server.listening_address).netloc

    def open_stream(prompt: list[int], max_tokens: int) -> Generator[int, None, int]:
        return _complete(address, prompt, max_tokens)

    used = [name for name in ("AVX512", "AVX2") if f"{name} = 1" in xllamacpp.get_system_info()]
    serve(
        f"xllamacpp {xllamacpp.__version__}, {options.model.stem.rpartition('.')[2]} weights, float16 KV; "
        f"its wheel from PyPI computes with {used[0] if used else 'neither AVX2 nor AVX-512'}",
        lambda job: streams.run(open_stream, job),
        replies,
    )
    # Its threads do not end while Python tears itself down.
    os._exit(0)


def _parameters(model: Path, drafts: bool) -> xllamacpp.CommonParams:
    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.n_parallel = _SLOTS
    params.n_ctx = _SLOTS * _SLOT_TOKENS
    # No prompt comes twice, so keeping finished ones would cost time and save none.
    params.cache_ram_mib = 0
    params.cpuparams.n_threads = os.cpu_count()
    params.cpuparams_batch.n_threads = os.cpu_count()
    if drafts:
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        params.speculative.ngram_simple.size_n = _MATCH_TOKENS
        params.speculative.ngram_simple.size_m = _DRAFT_TOKENS
    return params


def _complete(address: str, prompt: list[int], max_tokens: int) -> Generator[int, None, int]:
    body = {
        "prompt": prompt,
        "n_predict": max_tokens,
        "stream": True,
        "return_tokens": True,
        "temperature": 0.0,
        "ignore_eos": True,
        "cache_prompt": False,
    }
    connection = http.client.HTTPConnection(address)
    try:
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(response.read().decode())
        for line in response:
            if not line.startswith(b"data: "):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if event["stop"]:
                timings = event["timings"]
                return int(timings["predicted_n"]) - 1 - int(timings.get("draft_n_accepted", 0))
            if event["tokens"]:
                yield len(event["tokens"])
        raise RuntimeError("the stream ended without its last event")
    finally:
        connection.close()


if __name__ == "__main__":
    main()
