"""The engine's own exceptions, beside those of tandem_core.errors.

TandemError
├── CapacityError            the request can never fit this pod (FAILED_PRECONDITION); another may take it
└── TransferError            a KV transfer failed; the request is retried elsewhere
    └── LayoutMismatchError  the two pods' KV layouts differ
"""

from tandem_core.errors import TandemError


class CapacityError(TandemError):
    """The pod can never hold this request, whatever else finishes."""


class TransferError(TandemError):
    """A KV transfer did not complete."""


class LayoutMismatchError(TransferError):
    """The KV layouts of the two pods differ; the message shows both."""
