"""llama.cpp's OpenAI server, started through `xllamacpp`, whose wheel has no command for it.

    python benchmarks/llama_cpp_server.py MODEL_FOLDER --port PORT [--drafts]

Runs in an environment that has nothing but xllamacpp.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path

import xllamacpp

#: Tokens to match and to draft. Its defaults (12, 48) hardly ever match in dialogues: 1.03 tokens a step on
#: four of this benchmark's prompts, against 1.57 with these.
MATCH_TOKENS, DRAFT_TOKENS = 2, 5
#: Concurrent sequences, and tokens of each.
SLOTS, SLOT_TOKENS = 4, 7168
#: KV of earlier prompts beside that in the slots; vLLM's cache has the same size (peers.py).
CACHE_MIB = 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--drafts", action="store_true", help="n-gram lookup, without a second model")
    options = parser.parse_args()
    params = xllamacpp.CommonParams()
    manifest = json.loads((options.model / "tandem.json").read_text())
    params.model.path = str(options.model / manifest["weights"])
    params.chat_template = manifest["chat_template"]
    params.hostnames, params.port = ["127.0.0.1"], options.port
    params.n_parallel = SLOTS
    params.n_ctx = SLOTS * SLOT_TOKENS
    params.cache_ram_mib = CACHE_MIB
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = os.cpu_count()
    if options.drafts:
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        params.speculative.ngram_simple.size_n = MATCH_TOKENS
        params.speculative.ngram_simple.size_m = DRAFT_TOKENS
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    # SIGTERM ends the process; its threads do not end by themselves.
    signal.pause()


if __name__ == "__main__":
    main()
