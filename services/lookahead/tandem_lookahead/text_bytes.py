"""A namespace's whole text as bytes, for Redis: raw runs and which parts of them are shared. Pods never get
this.

magic "TLKR" | version u32 | promotion_requests u32 | runs u32 | digest, xxh3-128 of the rest
per run: bytes of its name u16, flags u8, offset u32, tokens u32, stretches u32, worth f64
the names, as UTF-8 | the stretches, begin and end u32 | the tokens, i32         (all little-endian)
"""

from __future__ import annotations

import struct

import numpy as np
import xxhash

from tandem_lookahead.text import NamespaceText, RawRun, TextPolicy

_MAGIC = b"TLKR"
_VERSION = 1
_HEADER = struct.Struct("<4sIII16s")
_RUN = struct.Struct("<HBIIId")
_PROMPT, _IMPORTED, _USED = 1, 2, 4


def to_bytes(text: NamespaceText) -> bytes:
    """The layout of the module's docstring."""
    runs = list(text.runs())
    names = [run.name.encode() for run in runs]
    heads = [
        _RUN.pack(
            len(name),
            _PROMPT * run.is_prompt | _IMPORTED * run.is_imported | _USED * run.is_used,
            run.offset,
            run.num_tokens,
            len(run.stretches),
            run.worth,
        )
        for name, run in zip(names, runs, strict=True)
    ]
    stretches = [edge for run in runs for stretch in run.stretches.items() for edge in stretch]
    body = b"".join(
        (
            *heads,
            *names,
            np.array(stretches, dtype="<u4").tobytes(),
            *(np.array(text.tokens(run), dtype="<i4").tobytes() for run in runs),
        )
    )
    header = _HEADER.pack(
        _MAGIC, _VERSION, text.policy.promotion_requests, len(runs), xxhash.xxh3_128_digest(body)
    )
    return header + body


def from_bytes(payload: bytes, policy: TextPolicy) -> NamespaceText:
    """Reads `to_bytes`' layout. Raises ValueError saying what is wrong.

    Text shared under another `promotion_requests` is judged anew.
    """
    if len(payload) < _HEADER.size:
        raise ValueError(f"snapshot is cut short: {len(payload)} bytes")
    magic, version, promotion_requests, num_runs, digest = _HEADER.unpack_from(payload)
    if magic != _MAGIC:
        raise ValueError("not a snapshot of a namespace's text")
    if version != _VERSION:
        raise ValueError(f"snapshot version {version}; this program reads {_VERSION}")
    body = memoryview(payload)[_HEADER.size :]
    if xxhash.xxh3_128_digest(body) != digest:
        raise ValueError("snapshot is damaged: its checksum does not match")
    heads = [_RUN.unpack_from(body, at * _RUN.size) for at in range(num_runs)]
    names_at = num_runs * _RUN.size
    edges_at = names_at + sum(head[0] for head in heads)
    tokens_at = edges_at + 8 * sum(head[4] for head in heads)
    edges = np.frombuffer(body[edges_at:tokens_at], "<u4").tolist()
    tokens = np.frombuffer(body[tokens_at:], "<i4").astype(np.int32)
    text = NamespaceText(policy)
    edge_at = token_at = 0
    for name_bytes, flags, offset, num_tokens, num_stretches, worth in heads:
        run = RawRun(
            number=-1,
            name=bytes(body[names_at : names_at + name_bytes]).decode(),
            is_prompt=bool(flags & _PROMPT),
            is_imported=bool(flags & _IMPORTED),
            offset=offset,
            num_tokens=num_tokens,
            stretches={edges[e]: edges[e + 1] for e in range(edge_at, edge_at + 2 * num_stretches, 2)},
            is_used=bool(flags & _USED),
            worth=worth,
        )
        text.restore(
            run,
            tokens[token_at : token_at + num_tokens].tolist(),
            keeps_stretches=promotion_requests == policy.promotion_requests,
        )
        names_at += name_bytes
        edge_at += 2 * num_stretches
        token_at += num_tokens
    text.trim()
    return text
