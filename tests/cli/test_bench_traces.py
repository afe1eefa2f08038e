"""Traces of three formats, and errors for other files."""

from __future__ import annotations

from pathlib import Path

import pytest
from tandem_cli.bench import BenchError
from tandem_cli.bench.traces import TraceEntry, mean_rate, read_trace

OWN = """
{"arrival_s": 4.5, "prompt_tokens": 900, "output_tokens": 60, "slo_class": "chat", "tenant": "a"}

{"arrival_s": 4.0}
"""
MOONCAKE = """{"timestamp": 3000, "input_length": 1030, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 3500, "input_length": 512, "output_length": 0, "hash_ids": [0]}
{"timestamp": 9000, "input_length": 40, "output_length": 5}
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
45.5,GPT-4,417,276,693,API log
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def test_tandems_lines_are_sorted_and_count_from_the_first(tmp_path: Path) -> None:
    assert read_trace(written(tmp_path, OWN)) == [
        TraceEntry(0.0),
        TraceEntry(0.5, 900, 60, slo_class="chat", tenant="a"),
    ]


def test_mooncake_s_times_are_milliseconds_and_its_blocks_are_kept(tmp_path: Path) -> None:
    first, second, third = read_trace(written(tmp_path, MOONCAKE))
    assert first == TraceEntry(0.0, 1030, 500, (0, 1, 2))
    assert second == TraceEntry(0.5, 512, 1, (0,))
    assert third == TraceEntry(6.0, 40, 5)


def test_burstgpt_s_failed_requests_are_skipped(tmp_path: Path) -> None:
    entries = read_trace(written(tmp_path, BURSTGPT.replace("\n", "\r\n")))
    assert entries == [TraceEntry(0.0, 472, 18), TraceEntry(40.5, 417, 276)]


def test_the_limit_counts_requests_and_the_rest_is_not_read(tmp_path: Path) -> None:
    path = written(tmp_path, MOONCAKE + "damaged")
    assert len(read_trace(path, limit=2)) == 2
    with pytest.raises(BenchError, match=":4: "):
        read_trace(path)


def test_the_mean_rate_counts_gaps(tmp_path: Path) -> None:
    assert mean_rate(read_trace(written(tmp_path, MOONCAKE))) == pytest.approx(2 / 6)
    assert mean_rate([TraceEntry(0.0), TraceEntry(0.0)]) == 0.0


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "holds no request"),
        ("BURST", "neither JSON lines nor BurstGPT's CSV with a column 'Timestamp'"),
        ("Timestamp,Request tokens\n", "'Response tokens'"),
        ('{"time": 3}', "neither arrival_s .seconds. nor Mooncake's timestamp"),
        ('{"timestamp": 3, "output_length": 1}', "1: it has no 'input_length'"),
        ('{"arrival_s": NaN}', "not a finite number"),
        ('{"arrival_s": 0, "prompt_tokens": 0}', "0 prompt tokens; at least 1"),
        ('{"timestamp": 1, "input_length": 600, "output_length": 1, "hash_ids": [3]}', "1 hash_ids for 600"),
        (BURSTGPT + "x,GPT-4,1,1,2,API log\n", ":5: Timestamp is 'x', not a number"),
        (BURSTGPT + "7,GPT-4,many,1,2,API log\n", ":5: Request tokens is 'many', not a whole number"),
        ('{"timestamp": 1, "input_length": 6, "output_length": 1, "hash_ids": ["a"]}', "hash_ids is 'a'"),
        ('{"arrival_s": "soon"}', "arrival_s is 'soon', not a number"),
        (BURSTGPT + "7,GPT-4\n", ":5: it has no 'Request tokens'"),
        ('{"arrival_s": 0}\n[1]', ":2: expected an object"),
    ],
)
def test_a_file_without_a_trace_is_refused_in_one_sentence(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(BenchError, match=complaint) as caught:
        read_trace(written(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"--trace .*none cannot be read"):
        read_trace(tmp_path / "none")
