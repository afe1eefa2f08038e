"""Merges the logs of all processes into one stream.

Console format: each line gets a coloured prefix with the name of its process. JSON format: lines of pods are
unchanged, because they contain role and pod; events of the supervisor are JSON lines too.

    line, event ──> queue ──> thread ──> descriptor

A thread writes, so a slow or closed reader, or a full disk, only loses lines.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from typing import Literal, TextIO

LogFormat = Literal["console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

_RESET = "\x1b[0m"
_COLOURS = {
    "gateway": "\x1b[36m",
    "decode": "\x1b[32m",
    "prefill": "\x1b[33m",
    "lookahead": "\x1b[35m",
    "redis": "\x1b[34m",
    "redis-answers": "\x1b[34m",
    "up": "\x1b[1m",
}
_NAME_WIDTH = 10
#: Most lines that wait to be written; the supervisor bounds the length of each.
_MOST_WAITING = 1024


class LogView:
    """Writes to the descriptor of one stream; colours only on a terminal and without NO_COLOR. Reports the
    number of lost lines with the next one."""

    def __init__(self, stream: TextIO, log_format: LogFormat) -> None:
        self._descriptor = stream.fileno()
        self._format = log_format
        self._waiting: queue.Queue[str | None] = queue.Queue(_MOST_WAITING)
        self._num_lost = 0
        self._lock = threading.Lock()
        #: Not the stream's buffer: the interpreter could not exit while a write to that is blocked.
        self._writer = threading.Thread(target=self._write_all, name="log view", daemon=True)
        self._writer.start()
        self._coloured = stream.isatty() and "NO_COLOR" not in os.environ

    def line(self, role: str, name: str, text: str) -> None:
        """Shows a line that a process printed."""
        if self._format == "json":
            self._write(text)
        else:
            self._write(f"{self._prefix(role, name)}{text}")

    def event(self, name: str, message: str) -> None:
        """Shows an event of the process `name`."""
        self._write(self._event(name, message))

    def _event(self, name: str, message: str) -> str:
        if self._format == "console":
            return f"{self._prefix('up', 'up')}{name}: {message}"
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        record = {"event": message, "role": "up", "pod": name, "level": "info", "timestamp": stamp}
        return json.dumps(record)

    def banner(self, text: str) -> None:
        """Text for people; left out in the JSON format."""
        if self._format == "console":
            self._write(text)

    def _prefix(self, role: str, name: str) -> str:
        padded = f"{name:<{_NAME_WIDTH}} | "
        return f"{_COLOURS.get(role, '')}{padded}{_RESET}" if self._coloured else padded

    def close(self, timeout_s: float = 1.0) -> None:
        """Writes the lines that wait, for this time at most."""
        try:
            self._waiting.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._writer.join(timeout_s)

    def _write(self, text: str) -> None:
        with self._lock:
            num_lost, self._num_lost = self._num_lost, 0
        if num_lost:
            text = f"{self._event('log', f'{num_lost} lines were lost')}\n{text}"
        try:
            self._waiting.put_nowait(text)
        except queue.Full:
            self._lose(num_lost + 1)

    def _lose(self, number: int) -> None:
        with self._lock:
            self._num_lost += number

    def _write_all(self) -> None:
        while (text := self._waiting.get()) is not None:
            rest = f"{text}\n".encode(errors="replace")
            try:
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
            except OSError:
                self._lose(1)
