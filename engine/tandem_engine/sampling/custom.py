"""Logits processors of the operator: functions that a pod imports at its start, and that requests name.

    --logits-processors digits=my_package.processors:only_digits
    {"logits_processors": ["digits"], ...}

A function gets the prompt's and the output's token ids and a row of logits, float32 [V], and returns such a
row; -inf forbids a token. It must be a function of these alone: then a token depends on the text so far, as
for every other parameter, and drafts, batches and another pod that continues an answer change nothing. All
pods must be started with the same ones. It runs on the engine's thread, so its time is added to each step.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
from tandem_core.errors import InvalidRequestError, ModelLoadError, quoted
from tandem_core.sampling import MAX_PROCESSOR_NAME_CHARS

Row = npt.NDArray[np.float32]
LogitsProcessor = Callable[[Sequence[int], Sequence[int], Row], Any]

#: Limit of processors of one pod.
MAX_REGISTERED = 64
_ENTRY = re.compile(r"(?:([\w.-]+)=)?([\w.]+):(\w+)", re.ASCII)


class LogitsProcessors:
    """The logits processors of one pod, by name."""

    def __init__(self, functions: Mapping[str, LogitsProcessor] = MappingProxyType({})) -> None:
        self._functions = functions

    @classmethod
    def load(cls, entries: Sequence[str]) -> LogitsProcessors:
        """`entries` are NAME=MODULE:FUNCTION, or MODULE:FUNCTION with the function's name as the name.

        Raises ModelLoadError for one that cannot be used.
        """
        functions: dict[str, LogitsProcessor] = {}
        if len(entries) > MAX_REGISTERED:
            raise ModelLoadError(
                f"--logits-processors: {len(entries)} are over the limit of {MAX_REGISTERED}"
            )
        for entry in entries:
            match = _ENTRY.fullmatch(entry)
            name = (match[1] or match[3]) if match else ""
            if match is None or len(name) > MAX_PROCESSOR_NAME_CHARS:
                raise ModelLoadError(
                    f"--logits-processors {quoted(entry)}: expected NAME=MODULE:FUNCTION, with a name of at "
                    f"most {MAX_PROCESSOR_NAME_CHARS} characters"
                )
            if name in functions:
                raise ModelLoadError(f"--logits-processors: the name {name} is given twice")
            try:
                function = getattr(importlib.import_module(match[2]), match[3])
            except Exception as error:  # whatever the module does when it is imported
                raise ModelLoadError(
                    f"--logits-processors {entry} cannot be imported ({type(error).__name__}: {error}); is "
                    "its package installed where the pod runs?"
                ) from error
            if not callable(function):
                raise ModelLoadError(f"--logits-processors {entry} is not a function")
            functions[name] = function
        return cls(functions)

    def check(self, names: Sequence[str]) -> None:
        """Raises InvalidRequestError for a name that is not registered."""
        for name in names:
            if name not in self._functions:
                known = ", ".join(sorted(self._functions)) or "none"
                raise InvalidRequestError(
                    "logits_processors",
                    f"{quoted(name)} is not registered; this pod was started with: {known}",
                )

    def apply(self, name: str, prompt: Sequence[int], output: Sequence[int], row: Row) -> Row:
        """The processed row. Raises InvalidRequestError if the function fails, because the engine, which
        serves others too, must go on."""
        try:
            result = np.asarray(self._functions[name](tuple(prompt), tuple(output), row.copy()), np.float32)
        except Exception as error:
            raise InvalidRequestError(
                "logits_processors", f"{quoted(name)} failed: {type(error).__name__}: {error}"
            ) from error
        # One test for NaN, +inf and no token left.
        if result.shape != row.shape or not np.isfinite(result.max()):
            raise InvalidRequestError(
                "logits_processors",
                f"{quoted(name)} must return a row of {len(row)} logits, none NaN or +inf and not all -inf",
            )
        return result


NO_PROCESSORS = LogitsProcessors()
