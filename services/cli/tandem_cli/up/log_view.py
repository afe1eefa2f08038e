"""Merges the logs of all processes into one stream.

Console format: each line gets a coloured prefix with the name of its process. JSON format: lines of pods are
unchanged, because they contain role and pod; events of the supervisor are JSON lines too.
"""

from __future__ import annotations

import json
import os
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
    "up": "\x1b[1m",
}
_NAME_WIDTH = 10


class LogView:
    """Writes to one stream; colours only on a terminal and without NO_COLOR."""

    def __init__(self, stream: TextIO, log_format: LogFormat) -> None:
        self._stream = stream
        self._format = log_format
        self._coloured = stream.isatty() and "NO_COLOR" not in os.environ

    def line(self, role: str, name: str, text: str) -> None:
        """A line that a process printed."""
        if self._format == "json":
            self._write(text)
        else:
            self._write(f"{self._prefix(role, name)}{text}")

    def event(self, name: str, message: str) -> None:
        """An event of the process `name`, reported by the supervisor."""
        if self._format == "json":
            stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            record = {"event": message, "role": "up", "pod": name, "level": "info", "timestamp": stamp}
            self._write(json.dumps(record))
        else:
            self._write(f"{self._prefix('up', 'up')}{name}: {message}")

    def banner(self, text: str) -> None:
        """Text for people; left out in the JSON format."""
        if self._format == "console":
            self._write(text)

    def _prefix(self, role: str, name: str) -> str:
        padded = f"{name:<{_NAME_WIDTH}} | "
        return f"{_COLOURS.get(role, '')}{padded}{_RESET}" if self._coloured else padded

    def _write(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()
