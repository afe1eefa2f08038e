"""The errors of a request, and how both APIs present them.

TandemError
├── InvalidRequestError         the caller's input            INVALID_ARGUMENT     400
│   ├── UnsupportedFieldError                                 INVALID_ARGUMENT     400
│   ├── ContextLengthError                                    INVALID_ARGUMENT     400
│   ├── BodyTooLargeError                                     INVALID_ARGUMENT     413
│   ├── BodyTimeoutError        arrives too slowly            INVALID_ARGUMENT     408
│   ├── BodyTypeError           is not called JSON            INVALID_ARGUMENT     415
│   ├── UnknownModelError                                     NOT_FOUND            404
│   ├── AnswerNotFoundError     no answer of this event id    NOT_FOUND            404
│   └── IdempotencyKeyError     used for another request      ALREADY_EXISTS       422
└── GatewayError                the gateway or a pod failed   INTERNAL             500
    ├── UnauthenticatedError    no key or a wrong one         UNAUTHENTICATED      401
    ├── ForbiddenError          the key does not allow it     PERMISSION_DENIED    403
    ├── OverloadedError         queue full, pod full          RESOURCE_EXHAUSTED   429 + Retry-After
    ├── DeadlineError           the deadline passed           DEADLINE_EXCEEDED    504
    ├── UnavailableError        no decode pod, or it failed   UNAVAILABLE          503 + Retry-After
    │   └── AnswerGivenUpError  Redis has lost the answer
    ├── CrashingRequestError    pods crashed with it          FAILED_PRECONDITION  422
    └── UpstreamError           the pod failed otherwise      INTERNAL             500
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import grpc
from tandem_core.contracts import RefusalReason
from tandem_core.errors import InvalidRequestError, TandemError

#: Message of the cancellation when the gateway, not the client, ends a request.
GATEWAY_STOPS = "the gateway is stopping"


class Outcome(enum.Enum):
    """How a request ended; the label of the counter of requests."""

    OK = "ok"
    INVALID = "invalid"
    UNAUTHENTICATED = "unauthenticated"
    REFUSED = "refused"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    UNAVAILABLE = "unavailable"
    ERROR = "error"


class LossCause(enum.Enum):
    """Why a request left a decode pod for another one; a label of the metrics."""

    CRASHED = "crashed"
    SILENT = "silent"
    UNREACHABLE = "unreachable"
    DRAINING = "draining"


class UnsupportedFieldError(InvalidRequestError):
    """A field of the API that this gateway does not serve."""


class ContextLengthError(InvalidRequestError):
    """The prompt exceeds the model's context, or prompt and output every decode pod's KV.

    The message begins with OpenAI's and vLLM's sentence, without the field: clients find it by its text.
    Anthropic's clients look for "prompt is too long".
    """

    def __init__(self, field: str, num_tokens: int, however: str) -> None:
        """`num_tokens`: the context length; `however`: a sentence about the request, with the remedy."""
        sentence = f"This model's maximum context length is {num_tokens} tokens."
        super().__init__(field, f"{sentence} However, {however}")

    def rename(self, field: str) -> None:
        super().rename(field)
        self.args = (self.message,)


class BodyTooLargeError(InvalidRequestError):
    """The HTTP body is over the limit; refused before it is parsed."""


class BodyTimeoutError(InvalidRequestError):
    """The HTTP body does not arrive."""


class BodyTypeError(InvalidRequestError):
    """The HTTP body has another media type than JSON, or is compressed."""


class UnknownModelError(InvalidRequestError):
    """The model is not served here."""


class AnswerNotFoundError(InvalidRequestError):
    """The answer that is to be resumed is not kept."""

    def __init__(self, message: str) -> None:
        super().__init__("Last-Event-ID", message)


class IdempotencyKeyError(InvalidRequestError):
    """The idempotency key belongs to a request with another content."""


class GatewayError(TandemError):
    """A request failed for a cause outside the request."""


class UnauthenticatedError(GatewayError):
    """The API key is missing or unknown."""


class ForbiddenError(GatewayError):
    """The API key does not allow this."""


#: Longest retry-after. Clients give up on a longer one, ignore it, or wait for all of it.
MAX_RETRY_AFTER_S = 60.0


class OverloadedError(GatewayError):
    """Refused at once; a retry is expected to succeed after `retry_after_s` seconds, or later if this is the
    maximum. None: never."""

    def __init__(self, message: str, retry_after_s: float | None, reason: RefusalReason) -> None:
        super().__init__(message)
        self.retry_after_s = None if retry_after_s is None else min(retry_after_s, MAX_RETRY_AFTER_S)
        self.reason = reason


class DeadlineError(GatewayError):
    """The deadline passed before the answer was complete."""


class UnavailableError(GatewayError):
    """No decode pod is healthy, or the pod failed during the request."""

    #: A pod restarts in seconds.
    retry_after_s = 2.0


class AnswerGivenUpError(UnavailableError):
    """The store has lost or replaced the answer, so the part in memory cannot be continued."""


class CrashingRequestError(GatewayError):
    """Two pods crashed with the request, or four went silent. After these statuses clients do not retry."""


class UpstreamError(GatewayError):
    """A pod failed with a status that indicates neither a wrong request nor an outage."""


#: All errors of a request; each message is one sentence for the caller.
REQUEST_ERRORS = (InvalidRequestError, GatewayError)


@dataclass(frozen=True)
class Presentation:
    """How both APIs present an error; `kind` and `code` are OpenAI's terms."""

    status: grpc.StatusCode
    http_status: int
    kind: str
    code: str
    outcome: Outcome


_CODES, _INVALID = grpc.StatusCode, "invalid_request_error"
PRESENTATIONS: Mapping[type[TandemError], Presentation] = MappingProxyType(
    {
        InvalidRequestError: Presentation(
            _CODES.INVALID_ARGUMENT, 400, _INVALID, "invalid_value", Outcome.INVALID),
        UnsupportedFieldError: Presentation(
            _CODES.INVALID_ARGUMENT, 400, _INVALID, "unsupported_parameter", Outcome.INVALID),
        ContextLengthError: Presentation(
            _CODES.INVALID_ARGUMENT, 400, _INVALID, "context_length_exceeded", Outcome.INVALID),
        BodyTooLargeError: Presentation(
            _CODES.INVALID_ARGUMENT, 413, _INVALID, "request_too_large", Outcome.INVALID),
        BodyTimeoutError: Presentation(
            _CODES.INVALID_ARGUMENT, 408, _INVALID, "request_timeout", Outcome.INVALID),
        BodyTypeError: Presentation(
            _CODES.INVALID_ARGUMENT, 415, _INVALID, "unsupported_media_type", Outcome.INVALID),
        UnknownModelError: Presentation(
            _CODES.NOT_FOUND, 404, _INVALID, "model_not_found", Outcome.INVALID),
        AnswerNotFoundError: Presentation(
            _CODES.NOT_FOUND, 404, _INVALID, "answer_not_found", Outcome.INVALID),
        IdempotencyKeyError: Presentation(
            _CODES.ALREADY_EXISTS, 422, _INVALID, "idempotency_key_reused", Outcome.INVALID),
        GatewayError: Presentation(
            _CODES.INTERNAL, 500, "server_error", "internal_error", Outcome.ERROR),
        UnauthenticatedError: Presentation(
            _CODES.UNAUTHENTICATED, 401, "authentication_error", "invalid_api_key", Outcome.UNAUTHENTICATED),
        ForbiddenError: Presentation(
            _CODES.PERMISSION_DENIED, 403, "permission_error", "forbidden", Outcome.UNAUTHENTICATED),
        OverloadedError: Presentation(
            _CODES.RESOURCE_EXHAUSTED, 429, "rate_limit_error", "overloaded", Outcome.REFUSED),
        DeadlineError: Presentation(
            _CODES.DEADLINE_EXCEEDED, 504, "timeout_error", "deadline_exceeded", Outcome.DEADLINE),
        UnavailableError: Presentation(
            _CODES.UNAVAILABLE, 503, "server_error", "unavailable", Outcome.UNAVAILABLE),
        CrashingRequestError: Presentation(
            _CODES.FAILED_PRECONDITION, 422, "server_error", "crashing_request", Outcome.ERROR),
    }
)  # fmt: skip


def presentation(error: TandemError) -> Presentation:
    """Looks up the error's nearest base class."""
    return next(PRESENTATIONS[base] for base in type(error).__mro__ if base in PRESENTATIONS)
