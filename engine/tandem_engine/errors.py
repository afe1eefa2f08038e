"""The engine's exceptions, one tree.

TandemError
├── InvalidRequestError      the caller's input; names field, limit and remedy (INVALID_ARGUMENT, 400)
├── CapacityError            the request can never fit this pod (FAILED_PRECONDITION); another may take it
├── ModelLoadError           a model file is missing, damaged or of a kind we cannot run
├── TransferError            a KV transfer failed; the request is retried elsewhere
│   └── LayoutMismatchError  the two pods' KV layouts differ
└── InvariantError           our own bug: a broken promise between parts
"""


class TandemError(Exception):
    """Base of all errors raised by Tandem's engine."""


class InvalidRequestError(TandemError):
    """The request cannot be served as it is. The message names the field, the limit and the remedy."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class CapacityError(TandemError):
    """The pod can never hold this request, whatever else finishes."""


class ModelLoadError(TandemError):
    """A model could not be found, read or understood. One sentence, with the remedy."""


class TransferError(TandemError):
    """A KV transfer did not complete."""


class LayoutMismatchError(TransferError):
    """The KV layouts of the two pods differ; the message shows both."""


class InvariantError(TandemError):
    """A part broke its contract; never caused by input."""
