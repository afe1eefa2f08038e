"""The records file of a benchmark: JSON lines from which all figures can be computed again.

{"config": {...}}                                                          the options, without keys
{"system": "global", "workload": "retail", "rate": 2.0, ..., "index": 0, "status": "OK", ...}
                                                                           one line for each request
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from tandem_cli.bench.options import BenchError, Point
from tandem_cli.bench.record import RequestRecord
from tandem_cli.bench.stats import Run, summarise

_RECORD = TypeAdapter(RequestRecord)


class RecordsWriter:
    """Creates the file; adds the records of each run that ends."""

    def __init__(self, path: Path, config: Mapping[str, object]) -> None:
        self._path = path
        path.write_text(json.dumps({"config": config}, ensure_ascii=False) + "\n", encoding="utf-8")

    def add(self, run: Run) -> None:
        where = {"system": run.system, **run.point._asdict(), "round": run.round}
        with self._path.open("a", encoding="utf-8") as file:
            for record in run.records:
                file.write(json.dumps({**where, **asdict(record)}, ensure_ascii=False) + "\n")


def read_runs(path: Path) -> list[Run]:
    """The runs in the order of the file. Raises BenchError."""
    found: dict[tuple[Point, int, str], list[RequestRecord]] = {}
    try:
        with path.open(encoding="utf-8") as file:
            # Not splitlines(), which also splits at U+2028 and the like, which JSON strings may contain.
            for number, line in enumerate(file, start=1):
                _read_line(line, f"{path}:{number}", found)
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"{path} cannot be read: {error}") from error
    if not found:
        raise BenchError(f"{path} holds no request; give a file that `tandem bench serve --output` wrote")
    return [_run(key, records) for key, records in found.items()]


def _read_line(line: str, where: str, found: dict[tuple[Point, int, str], list[RequestRecord]]) -> None:
    try:
        raw = json.loads(line)
        if "config" in raw:
            return
        point = Point(raw.pop("workload"), raw.pop("concurrency"), raw.pop("rate"))
        key = (point, raw.pop("round"), raw.pop("system"))
        record = _RECORD.validate_python(raw)
    except (ValueError, TypeError, KeyError, AttributeError, ValidationError) as error:
        reason = str(error).splitlines()[0]
        raise BenchError(
            f"{where}: no record of `tandem bench serve --output`: {reason}; the line may be cut off or from "
            "another version"
        ) from error
    found.setdefault(key, []).append(record)


def _run(key: tuple[Point, int, str], records: Sequence[RequestRecord]) -> Run:
    point, number, system = key
    return Run(point, number, system, summarise(records), tuple(records))
