"""Every way a request can be refused or fail, one tree; both front ends render from it.

GatewayError
├── InvalidRequestError     the caller's input            INVALID_ARGUMENT     400 (413 for a huge body)
├── UnknownModelError                                     NOT_FOUND            404
├── UnauthenticatedError    no key or a wrong one         UNAUTHENTICATED      401
├── ForbiddenError          the key may not do that       PERMISSION_DENIED    403
├── OverloadedError         queue full, pod full          RESOURCE_EXHAUSTED   429 + Retry-After
├── DeadlineError           the client's time is over     DEADLINE_EXCEEDED    504
├── UnavailableError        no decode pod, or it died     UNAVAILABLE          503
└── UpstreamError           the pod failed otherwise      INTERNAL             500
"""

from __future__ import annotations

import enum

import grpc


class Outcome(enum.Enum):
    """How a request ended; the label of the request counter."""

    OK = "ok"
    INVALID = "invalid"
    UNAUTHENTICATED = "unauthenticated"
    REFUSED = "refused"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    UNAVAILABLE = "unavailable"
    ERROR = "error"


class GatewayError(Exception):
    """Base. Class attributes say how each front end shows it; `kind` and `code` are OpenAI's words."""

    status = grpc.StatusCode.INTERNAL
    http_status = 500
    kind = "server_error"
    code = "internal_error"
    outcome = Outcome.ERROR


class InvalidRequestError(GatewayError):
    """A field of the request is wrong. The message names the field, the limit and the remedy."""

    status = grpc.StatusCode.INVALID_ARGUMENT
    http_status = 400
    kind = "invalid_request_error"
    code = "invalid_value"
    outcome = Outcome.INVALID

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class UnsupportedFieldError(InvalidRequestError):
    """A field that the API has and we do not serve."""

    code = "unsupported_parameter"


class ContextLengthError(InvalidRequestError):
    """The prompt, or prompt and output together, exceed the model's context, or every decode pod's KV."""

    code = "context_length_exceeded"


class BodyTooLargeError(InvalidRequestError):
    """The HTTP body is over the limit; refused before it is parsed."""

    http_status = 413
    code = "request_too_large"


class UnknownModelError(GatewayError):
    status = grpc.StatusCode.NOT_FOUND
    http_status = 404
    kind = "invalid_request_error"
    code = "model_not_found"
    outcome = Outcome.INVALID

    def __init__(self, asked: str, served: str) -> None:
        super().__init__(f"model: {asked!r} is not served here; use {served!r} or leave it empty")


class UnauthenticatedError(GatewayError):
    status = grpc.StatusCode.UNAUTHENTICATED
    http_status = 401
    kind = "authentication_error"
    code = "invalid_api_key"
    outcome = Outcome.UNAUTHENTICATED


class ForbiddenError(GatewayError):
    status = grpc.StatusCode.PERMISSION_DENIED
    http_status = 403
    kind = "permission_error"
    code = "forbidden"
    outcome = Outcome.UNAUTHENTICATED


class OverloadedError(GatewayError):
    """Refused at once; `retry_after_s` is when a place is expected."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED
    http_status = 429
    kind = "rate_limit_error"
    code = "overloaded"
    outcome = Outcome.REFUSED

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineError(GatewayError):
    status = grpc.StatusCode.DEADLINE_EXCEEDED
    http_status = 504
    kind = "timeout_error"
    code = "deadline_exceeded"
    outcome = Outcome.DEADLINE


class UnavailableError(GatewayError):
    status = grpc.StatusCode.UNAVAILABLE
    http_status = 503
    code = "unavailable"
    outcome = Outcome.UNAVAILABLE


class UpstreamError(GatewayError):
    """A pod answered with a status that is neither the caller's fault nor an outage."""
