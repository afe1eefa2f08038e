"""What the Python programs here share: the system's addresses, and the record of the features that ran."""

from __future__ import annotations

import asyncio
import atexit
import inspect
import json
import os
import shlex
import string
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

URL = os.environ["TANDEM_URL"]
BASE_URL = f"{URL}/v1"
MODEL = os.environ["TANDEM_MODEL"]
#: With the model's tokenizer, which load tools use to count.
MODEL_FOLDER = os.environ["TANDEM_MODEL_FOLDER"]
#: Seeded and as long as `max_tokens` allows: the model is random, and its end token may come at any time.
TO_THE_LIMIT = {"ignore_eos": True, "seed": 1}

_results: dict[str, str] = {}
#: One for all features: clients keep connections, which belong to a loop.
_loop = asyncio.new_event_loop()


def feature(name: str) -> Callable[[Callable[[], Any]], None]:
    """Runs the decorated function at once. Records under `name` how it ended: "" or the error."""

    def run(function: Callable[[], Any]) -> None:
        try:
            ended = function()
            if inspect.isawaitable(ended):
                _loop.run_until_complete(ended)
            _results[name] = ""
        except Exception as error:
            traceback.print_exc()
            _results[name] = f"{type(error).__name__}: {error}"

    return run


def words_of(command: str) -> list[str]:
    """The words of a snippet in shell, with the values of $URL, $BASE_URL, $MODEL and $MODEL_FOLDER."""
    values = {"URL": URL, "BASE_URL": BASE_URL, "MODEL": MODEL, "MODEL_FOLDER": MODEL_FOLDER}
    return shlex.split(string.Template(command).substitute(values).replace("\\\n", " "), comments=True)


@atexit.register
def _report() -> None:
    Path(os.environ["TANDEM_RESULTS"]).write_text(json.dumps(_results))
