"""Exceptions that all parts share.

TandemError
├── InvalidRequestError      the caller's input; names field, limit and remedy (INVALID_ARGUMENT, 400)
├── ModelLoadError           a model file is missing, damaged or of an unsupported kind
├── CapacityError            the request can never fit this pod (FAILED_PRECONDITION); another may take it
├── TransferError            a KV transfer failed; the request is retried elsewhere (decode pods UNAVAILABLE,
│   │                        prefill pods ABORTED)
│   └── LayoutMismatchError  the two pods' KV layouts differ (FAILED_PRECONDITION)
├── LogitsError              the model's numbers for one text overflowed (INTERNAL)
└── InvariantError           our own bug: a part broke its contract
"""

#: Longest name of a field, and longest quoted value; the rest is cut.
MAX_FIELD_CHARS = 100
_MAX_MESSAGE_CHARS = 1000


def _cut(text: str, num_chars: int) -> str:
    return text if len(text) <= num_chars else text[:num_chars] + "…"


def quoted(value: str) -> str:
    """The caller's value for a message, in quotes; a long one is cut."""
    return repr(_cut(value, MAX_FIELD_CHARS))


class TandemError(Exception):
    """Base of all of Tandem's own errors."""


class InvalidRequestError(TandemError):
    """The request cannot be served as it is. The message names the field, the limit and the remedy.

    Both may quote the caller's input and are cut where that is long.
    """

    def __init__(self, field: str, message: str) -> None:
        self.message = _cut(message, _MAX_MESSAGE_CHARS)
        self.rename(field)

    def rename(self, field: str) -> None:
        """Names the field as the caller knows it."""
        self.field = _cut(field, MAX_FIELD_CHARS)
        self.args = (f"{self.field}: {self.message}",)


class ModelLoadError(TandemError):
    """A model could not be found, read or understood. One sentence, with the remedy.

    It may quote the model's files and is cut where that is long.
    """

    def __init__(self, message: str) -> None:
        super().__init__(_cut(message, _MAX_MESSAGE_CHARS))


class InvariantError(TandemError):
    """A part broke its contract; never caused by input."""


class CapacityError(TandemError):
    """The pod can never hold this request, whatever else finishes."""


class TransferError(TandemError):
    """A KV transfer did not complete."""


class LogitsError(TandemError):
    """The model gives no distribution for the next token of one text."""

    def __init__(self) -> None:
        super().__init__(
            "the model computed NaN or infinite logits for this text; shorten or change the prompt, or serve "
            "the model with --dtype float32"
        )


class LayoutMismatchError(TransferError):
    """The KV layouts of the two pods differ; the message shows both."""
