"""Shows a prompt's text and log probabilities.

A pod sends a prompt's log probabilities as arrays (PromptLogprobs) with the first token of the prompt's first
choice. This module joins them with the prompt's token ids:

    `prompt_logprobs`   vLLM's field: per token {id: {logprob, rank, decoded_token}}, null for the first
    `echo`              the prompt's text before the answer's, and its tokens among those of `logprobs`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from tandem_core.errors import InvalidRequestError
from tandem_core.model.tokenizer import Tokenizer
from tandem_proto.v1 import common_pb2, decode_pb2

from tandem_gateway.request import Event, ReceivedRequest, TokenizedRequest

#: Limit per call, for example 24,966 tokens with 20 alternatives each.
MAX_VALUES = 2**19
#: Most bytes to skip in the text where a normalizer has changed a character.
_MAX_SKIPPED_BYTES = 16


def check_size(prompts: Sequence[TokenizedRequest], num_choices: int) -> None:
    """Raises InvalidRequestError when an answer would show more than MAX_VALUES values."""
    num_top = prompts[0].sampling.prompt_logprobs
    if num_top is None:
        return
    num_tokens = sum(len(prompt.prompt_token_ids) for prompt in prompts) * num_choices
    if num_tokens * (num_top + 1) > MAX_VALUES:
        raise InvalidRequestError(
            "prompt_logprobs",
            f"of {num_tokens} prompt tokens in all prompts and choices, with {num_top} alternatives each, "
            f"are over the limit of {MAX_VALUES} values in one call; send fewer or shorter prompts, or ask "
            "for fewer alternatives",
        )


def echoed_text(
    tokenizer: Tokenizer, prompt: str | Sequence[int], received: ReceivedRequest, request: TokenizedRequest
) -> str:
    """The text of a prompt as sent, or decoded if it was sent as token ids or truncated."""
    if isinstance(prompt, str) and received.truncate_to is None:
        return prompt
    skips_special = request.sampling.skip_special_tokens
    return tokenizer.decode(request.prompt_token_ids, skip_special_tokens=skips_special)


def without_output(event: Event) -> Event:
    """The visible part of an event in a call that asks only for its prompt."""
    if isinstance(event, decode_pb2.DecodeFinished):
        reason = common_pb2.FINISH_REASON_LENGTH
        return decode_pb2.DecodeFinished(choice=event.choice, reason=reason, receipt=event.receipt)
    logprobs = event.prompt_logprobs if event.HasField("prompt_logprobs") else None
    return decode_pb2.DecodeChunk(choice=event.choice, prompt_logprobs=logprobs)


def rows(logprobs: common_pb2.PromptLogprobs) -> Iterator[list[tuple[int, float]]]:
    """The most likely tokens of each position, with their log probabilities."""
    ids, values = list(logprobs.top_token_ids), list(logprobs.top_logprobs)
    num_positions = len(logprobs.logprobs)
    num_top = len(ids) // max(num_positions, 1)
    for position in range(num_positions):
        at = slice(position * num_top, (position + 1) * num_top)
        yield list(zip(ids[at], values[at], strict=True))


def to_json(
    logprobs: common_pb2.PromptLogprobs,
    prompt_token_ids: Sequence[int],
    num_top: int,
    token_bytes: Callable[[int], bytes],
) -> list[Mapping[str, Mapping[str, float | int | str]] | None]:
    """vLLM's `prompt_logprobs`: the prompt's token first, then the num_top most likely."""
    names: dict[int, str] = {}

    def entry(token_id: int, logprob: float, rank: int) -> Mapping[str, float | int | str]:
        name = names.get(token_id)
        if name is None:
            name = names[token_id] = token_bytes(token_id).decode("utf-8", "replace")
        return {"logprob": logprob, "rank": rank, "decoded_token": name}

    shown: list[Mapping[str, Mapping[str, float | int | str]] | None] = [None]
    tokens = zip(prompt_token_ids[1:], logprobs.logprobs, logprobs.ranks, rows(logprobs), strict=True)
    for token_id, logprob, rank, top in tokens:
        position = {str(token_id): entry(token_id, logprob, rank)}
        for place, (other_id, other) in enumerate(top[:num_top], start=1):
            position.setdefault(str(other_id), entry(other_id, other, place))
        shown.append(position)
    return shown


def to_positions(
    logprobs: common_pb2.PromptLogprobs, prompt_token_ids: Sequence[int], num_top: int
) -> list[common_pb2.PositionLogprobs]:
    """The form that an answer's tokens have. The first token's log probability is a placeholder."""
    first = common_pb2.PositionLogprobs(chosen=common_pb2.TokenLogprob(token_id=prompt_token_ids[0]))
    tokens = zip(prompt_token_ids[1:], logprobs.logprobs, rows(logprobs), strict=True)
    return [first] + [
        common_pb2.PositionLogprobs(
            chosen=common_pb2.TokenLogprob(token_id=token_id, logprob=logprob),
            top=[common_pb2.TokenLogprob(token_id=i, logprob=value) for i, value in top[:num_top]],
        )
        for token_id, logprob, top in tokens
    ]


def text_offsets(text: str, pieces: Sequence[bytes]) -> list[int]:
    """Where each token begins in the text, in characters. A token within a character has its position.

    Tokens without text, such as a leading special token, have the position of the next token.
    """
    raw = text.encode("utf-8", "surrogatepass")
    #: The character of each byte.
    char_of: list[int] = []
    for number, char in enumerate(text):
        char_of += [number] * len(char.encode("utf-8", "surrogatepass"))
    char_of.append(len(text))
    offsets, at = [], 0
    for piece in pieces:
        if at == 0 and not raw.startswith(piece) and raw.startswith(piece.removeprefix(b" ")):
            piece = piece.removeprefix(b" ")  # added by the tokenizer
        begin = raw.find(piece, at, at + _MAX_SKIPPED_BYTES + len(piece)) if piece else -1
        offsets.append(char_of[max(begin, at)])
        if begin >= 0:
            at = begin + len(piece)
    return offsets
