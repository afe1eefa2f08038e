"""What the driver and a peer's process say to each other; standard library only.

driver                                    peer
       <──  {"ready": {description}}        once, when it can serve
  {job} ──>
       <──  {"answer": {...}}  or  {"error": "..."}
end of input ──>                            cleans up and exits
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TextIO


@dataclass(frozen=True)
class Together:
    """Requests sent at the same moment, each for max_tokens greedy tokens, end tokens ignored."""

    prompts: list[list[int]]
    max_tokens: int


@dataclass(frozen=True)
class Interference:
    """A running stream, and another prompt that arrives when the stream has had num_before tokens.

    The stream is cancelled num_after tokens after the other's first token.
    """

    running: list[int]
    arriving: list[int]
    num_before: int
    num_after: int


Job = Together | Interference
_KINDS: dict[str, type[Together] | type[Interference]] = {"together": Together, "interference": Interference}


@dataclass(frozen=True)
class Stream:
    """What a client saw of one request; times in seconds since an instant common to the job's streams."""

    sent_s: float
    #: When tokens arrived and how many did at that moment.
    times_s: list[float]
    counts: list[int]
    #: Forward passes after the one that gave the first token; 0 where the peer does not tell.
    decode_steps: int = 0


@dataclass(frozen=True)
class Answer:
    """One stream per prompt of a Together; the running and the arriving one of an Interference."""

    streams: list[Stream]


def encode_job(job: Job) -> str:
    return json.dumps({"kind": type(job).__name__.lower(), **asdict(job)})


def decode_job(line: str) -> Job:
    fields = json.loads(line)
    return _KINDS[fields.pop("kind")](**fields)


def decode_answer(fields: dict[str, list[dict[str, object]]]) -> Answer:
    return Answer([Stream(**stream) for stream in fields["streams"]])  # type: ignore[arg-type]


def serve(description: str, handle: Callable[[Job], Answer], replies: TextIO) -> None:
    """Answers jobs until the input ends; a job that fails is answered with its error."""
    _say(replies, {"ready": description})
    for line in sys.stdin:
        try:
            _say(replies, {"answer": asdict(handle(decode_job(line)))})
        except Exception as error:
            traceback.print_exc()
            _say(replies, {"error": f"{type(error).__name__}: {error}"})


def take_stdout() -> TextIO:
    """The standard output, for replies alone; what libraries print from now on goes to standard error."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return replies


def _say(replies: TextIO, message: dict[str, object]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()
