"""The merged log of `tandem up`: only lines that cannot be written are lost."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
from tandem_cli.up.log_view import LogView


def test_the_json_log_stays_json(capfd: pytest.CaptureFixture[str]) -> None:
    view = LogView(sys.stdout, "json")
    view.line("decode", "decode-0", '{"event": "x"}')
    view.event("decode-0", 'died of "y"')
    view.banner("for people")
    view.close()
    first, second = (json.loads(line) for line in capfd.readouterr().out.splitlines())
    assert first == {"event": "x"}
    assert (second["event"], second["pod"], second["role"]) == ('died of "y"', "decode-0", "up")


def test_the_console_log_prefixes_each_line_without_colour_off_a_terminal(
    capfd: pytest.CaptureFixture[str],
) -> None:
    view = LogView(sys.stdout, "console")
    view.line("decode", "decode-0", "hello")
    view.close()
    assert capfd.readouterr().out == "decode-0   | hello\n"


def test_a_closed_reader_only_loses_lines() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        view = LogView(stream, "console")
        view.line("decode", "decode-0", "lost")
        view.event("decode-0", "lost as well")
        view.close()


def test_a_full_disk_only_loses_lines() -> None:
    with Path("/dev/full").open("w") as stream:
        view = LogView(stream, "console")
        view.line("decode", "decode-0", "lost")
        view.close()


def test_a_blocked_reader_delays_no_process_and_gets_the_number_of_lost_lines() -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader) as lines, os.fdopen(writer, "w") as stream:
        view = LogView(stream, "json")
        began = time.monotonic()
        for number in range(5000):
            view.line("decode", "decode-0", json.dumps({"number": number, "text": "x" * 100}))
        assert time.monotonic() - began < 1.0
        found = [json.loads(lines.readline()) for _ in range(1024)]
        view.event("decode-0", "after")
        while found[-1].get("event") != "after":
            found.append(json.loads(lines.readline()))
        numbers = [line["number"] for line in found if "number" in line]
        lost = [int(line["event"].split()[0]) for line in found if "lost" in line.get("event", "")]
        assert numbers == sorted(set(numbers))
        assert len(numbers) + sum(lost) == 5000 and lost
        view.close()


def test_a_view_with_a_blocked_reader_can_be_closed() -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader), os.fdopen(writer, "w") as stream:
        view = LogView(stream, "console")
        for _ in range(5000):
            view.line("decode", "decode-0", "x" * 100)
        began = time.monotonic()
        view.close(0.1)
        assert time.monotonic() - began < 1.0
