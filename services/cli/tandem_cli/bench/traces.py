"""Recorded arrivals to replay: times and lengths of requests.

The first line of a file determines its format:

    {"arrival_s": 1.5, "prompt_tokens": 900, "output_tokens": 60, "slo_class": "chat", "tenant": "a"}
        JSON lines of Tandem; the time in seconds; the other keys are optional
    {"timestamp": 1500, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}
        JSON lines of Mooncake; the time in milliseconds; equal ids are equal blocks of 512 prompt tokens
    Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
        CSV of BurstGPT; the time in seconds; skips failed requests, which have no response tokens

Other columns and keys are ignored. Times count from the first request of the file.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from tandem_cli.bench import BenchError

#: Prompt tokens of a block in Mooncake's traces.
BLOCK_TOKENS = 512


@dataclass(frozen=True)
class TraceEntry:
    """A request of a trace. For None or "" the run's options apply."""

    arrival_s: float
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    #: Ids of the prompt's blocks of 512 tokens; the last one may be partial. Equal ids are equal text.
    blocks: tuple[int, ...] = ()
    slo_class: str = ""
    tenant: str = ""

    def __post_init__(self) -> None:
        if not math.isfinite(self.arrival_s):
            raise ValueError("the time is not a finite number")
        for name, value in (("prompt", self.prompt_tokens), ("output", self.output_tokens)):
            if value is not None and value < 1:
                raise ValueError(f"{value} {name} tokens; at least 1 is needed")
        if self.blocks and len(self.blocks) != math.ceil((self.prompt_tokens or 0) / BLOCK_TOKENS):
            raise ValueError(
                f"{len(self.blocks)} hash_ids for {self.prompt_tokens} tokens; one for each {BLOCK_TOKENS} "
                "tokens is needed"
            )


def read_trace(path: Path, limit: int | None = None) -> list[TraceEntry]:
    """The first `limit` entries, or all, the first at 0 s. Raises BenchError."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            entries = list(islice(_entries(file, str(path)), limit))
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"--trace {path} cannot be read: {error}") from error
    if not entries:
        raise BenchError(f"--trace {path} holds no request")
    # Concurrent writers may have swapped lines.
    entries.sort(key=lambda entry: entry.arrival_s)
    first_s = entries[0].arrival_s
    return [replace(entry, arrival_s=entry.arrival_s - first_s) for entry in entries]


def mean_rate(entries: list[TraceEntry]) -> float:
    """Requests per second as recorded; 0 if all came at once."""
    last_s = entries[-1].arrival_s
    return (len(entries) - 1) / last_s if last_s else 0.0


def _entries(lines: Iterable[str], origin: str) -> Iterator[TraceEntry]:
    numbered = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
    first = next(numbered, None)
    if first is None:
        return
    rows = _with_first(first, numbered)
    parse = _from_json
    if not first[1].lstrip().startswith("{"):
        _, head = next(rows)
        columns = next(csv.reader([head]))
        wanted = ("Timestamp", "Request tokens", "Response tokens")
        if missing := [name for name in wanted if name not in columns]:
            raise BenchError(
                f"--trace {origin}: neither JSON lines nor BurstGPT's CSV with a column {missing[0]!r}; "
                "give a trace of Tandem, Mooncake or BurstGPT"
            )

        def parse(line: str) -> TraceEntry | None:
            return _from_burstgpt(dict(zip(columns, next(csv.reader([line])), strict=False)))

    for number, line in rows:
        try:
            entry = parse(line)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise BenchError(f"--trace {origin}:{number}: {what}") from error
        if entry is not None:
            yield entry


def _with_first(first: tuple[int, str], others: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    yield first
    yield from others


def _from_json(line: str) -> TraceEntry | None:
    raw = json.loads(line)
    if not isinstance(raw, dict):
        raise ValueError("expected an object")
    if "timestamp" in raw:
        return TraceEntry(
            arrival_s=_number(raw, "timestamp") / 1000,
            prompt_tokens=_count(raw, "input_length"),
            output_tokens=max(1, _count(raw, "output_length")),
            blocks=tuple(_count({"hash_ids": block}, "hash_ids") for block in raw.get("hash_ids") or ()),
        )
    if "arrival_s" not in raw:
        raise ValueError("it has neither arrival_s (seconds) nor Mooncake's timestamp (milliseconds)")
    return TraceEntry(
        arrival_s=_number(raw, "arrival_s"),
        prompt_tokens=_optional_count(raw, "prompt_tokens"),
        output_tokens=_optional_count(raw, "output_tokens"),
        slo_class=str(raw.get("slo_class") or ""),
        tenant=str(raw.get("tenant") or ""),
    )


def _number(raw: Mapping[str, object], name: str) -> float:
    try:
        return float(str(raw[name]))
    except ValueError:
        raise ValueError(f"{name} is {raw[name]!r}, not a number") from None


def _count(raw: Mapping[str, object], name: str) -> int:
    try:
        return int(str(raw[name]))
    except ValueError:
        raise ValueError(f"{name} is {raw[name]!r}, not a whole number") from None


def _optional_count(raw: Mapping[str, object], name: str) -> int | None:
    return None if raw.get(name) is None else _count(raw, name)


def _from_burstgpt(row: dict[str, str]) -> TraceEntry | None:
    """The entry of a row; None for a request that failed."""
    prompt_tokens, output_tokens = _count(row, "Request tokens"), _count(row, "Response tokens")
    if prompt_tokens < 1 or output_tokens < 1:
        return None
    return TraceEntry(_number(row, "Timestamp"), prompt_tokens, output_tokens)
