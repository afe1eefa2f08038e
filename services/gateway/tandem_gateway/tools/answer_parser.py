"""Parses the text of one choice into reasoning, content and tool calls.

    text --ReasoningSplitter--> rest --CallsParser--> AnswerDelta

The AnswerForm (answers.proto) selects the parts to look for. It is stored with the answer, so that every
gateway that resumes the stream shows the same result.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

from tandem_proto.v1 import answers_pb2, common_pb2, decode_pb2

from tandem_gateway.request import num_choices_of
from tandem_gateway.tools.calls_parser import CallsParser
from tandem_gateway.tools.formats import FORMATS
from tandem_gateway.tools.reasoning import ReasoningSplitter


@dataclass
class CallDelta:
    """A part of a call; the first part has `id` and `name`."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass
class AnswerDelta:
    """The additions of a piece of text; its reasoning precedes the rest."""

    reasoning: str = ""
    #: Content and calls in the order of the text; neighbours are never two texts or two parts of one call.
    parts: list[str | CallDelta] = field(default_factory=list)

    @property
    def content(self) -> str:
        return "".join([part for part in self.parts if isinstance(part, str)])

    @property
    def calls(self) -> list[CallDelta]:
        """At most one of each index."""
        return [part for part in self.parts if isinstance(part, CallDelta)]

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.parts)

    def __add__(self, later: AnswerDelta) -> AnswerDelta:
        parts, following = list(self.parts), list(later.parts)
        if parts and following:
            last, first = parts[-1], following[0]
            if isinstance(last, str) and isinstance(first, str):
                parts[-1:], following[:1] = [last + first], []
            elif isinstance(last, CallDelta) and isinstance(first, CallDelta) and first.index == last.index:
                parts[-1:], following[:1] = [replace(last, arguments=last.arguments + first.arguments)], []
        return AnswerDelta(self.reasoning + later.reasoning, parts + following)


def parsers_of(record: answers_pb2.AnswerRecord) -> list[AnswerParser]:
    """The parsers of an answer's choices, by number."""
    sampling = record.request.sampling
    has_stops = bool(sampling.stop or sampling.stop_token_ids)
    return [
        AnswerParser(record.form, seed=f"{record.id}-{choice}" if choice else record.id, has_stops=has_stops)
        for choice in range(num_choices_of(record))
    ]


class AnswerParser:
    """Parses one choice. `seed` determines the ids of calls, which are equal for all readers of an answer."""

    def __init__(self, form: answers_pb2.AnswerForm, seed: str, *, has_stops: bool = False) -> None:
        """`has_stops`: the caller's stops may cut a call, which must not be executed then, so calls are shown
        when they are complete."""
        self._seed = seed
        self._has_stops = has_stops
        self._is_single = form.single_call
        tool_format = FORMATS.get(form.tool_format)
        self._has_short_ids = tool_format is not None and tool_format.has_short_ids
        names = frozenset(form.tool_names)
        self._calls = None
        if tool_format is not None:
            self._calls = CallsParser(
                tool_format, names, self, is_guided=form.guided, is_required=form.required
            )
        self._reasoning = ReasoningSplitter(is_inside=form.starts_in_reasoning) if form.reasoning else None
        self._num_calls = 0
        #: Whether the answer ends with calls, which the client executes; known after `finish`.
        self.ends_with_calls = False
        #: What the next delta gets: texts in pieces, and calls with the pieces of their arguments.
        self._new: list[tuple[CallDelta | None, list[str]]] = []

    def push(self, text: str) -> AnswerDelta:
        reasoning = ""
        if self._reasoning is not None:
            reasoning, text = self._reasoning.push(text)
        self._push_rest(text)
        return self._taken(reasoning)

    def finish(self, end: decode_pb2.DecodeFinished) -> AnswerDelta:
        """Returns text held back so far. Call it once, after the last text.

        A call that a stop of the caller has cut is left out, and its markup, as cut by a stop or the token
        limit, is no content.
        """
        reasoning = ""
        if self._reasoning is not None:
            reasoning, text = self._reasoning.finish()
            self._push_rest(text)
        is_stop = bool(end.stop_reason) or end.HasField("stop_token_id")
        is_cut_call = is_stop and self._is_in_shown_call
        if is_cut_call:
            self._new.pop()  # it was held back as a whole
        elif self._calls is not None:
            self._calls.finish(is_cut=is_stop or end.reason == common_pb2.FINISH_REASON_LENGTH)
        is_at_end = end.reason == common_pb2.FINISH_REASON_STOP
        self.ends_with_calls = self._num_calls > 0 and is_at_end and not is_cut_call
        self._has_stops = False
        return self._taken(reasoning)

    def content(self, text: str) -> None:
        if not text:
            return
        if not self._new or self._new[-1][0] is not None:
            self._new.append((None, []))
        self._new[-1][1].append(text)

    def begin_call(self, name: str) -> None:
        self._num_calls += 1
        if self._is_shown:
            index = self._num_calls - 1
            self._new.append((CallDelta(index, self._call_id(index), name), []))

    def arguments(self, text: str) -> None:
        if not (self._is_shown and text):
            return
        if not self._new or self._new[-1][0] is None:
            self._new.append((CallDelta(self._num_calls - 1), []))
        self._new[-1][1].append(text)

    @property
    def _is_in_shown_call(self) -> bool:
        return self._calls is not None and self._calls.is_in_call and self._is_shown

    @property
    def _is_shown(self) -> bool:
        return self._num_calls == 1 or not self._is_single

    def _push_rest(self, text: str) -> None:
        if self._calls is not None:
            self._calls.push(text)
        else:
            self.content(text)

    def _call_id(self, index: int) -> str:
        digest = hashlib.sha256(f"{self._seed} {index}".encode()).hexdigest()
        return digest[:9] if self._has_short_ids else f"call_{digest[:24]}"

    def _taken(self, reasoning: str) -> AnswerDelta:
        held = self._new[-1:] if self._has_stops and self._is_in_shown_call else []
        new, self._new = self._new[: len(self._new) - len(held)], held
        return AnswerDelta(
            reasoning,
            [
                "".join(pieces) if call is None else replace(call, arguments="".join(pieces))
                for call, pieces in new
            ],
        )
