"""The errors that callers see, each with one gRPC status code and one constant reason.

On the wire an error is a `google.rpc.Status` with one `ErrorInfo` (domain `specdecode`, the reason below),
plus `BadRequest` for fields and `RetryInfo` where waiting helps; `specdecode.wire` translates.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

import grpc

ERROR_DOMAIN = "specdecode"


class Reason(StrEnum):
    """Constant machine-readable reasons (`ErrorInfo.reason`)."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
    MODEL_NOT_SUPPORTED = "MODEL_NOT_SUPPORTED"
    VOCABULARY_MISMATCH = "VOCABULARY_MISMATCH"
    VERSION_MISMATCH = "VERSION_MISMATCH"
    MODEL_MISMATCH = "MODEL_MISMATCH"
    QUEUE_FULL = "QUEUE_FULL"
    KV_TOO_SMALL = "KV_TOO_SMALL"
    NUMERICAL_ERROR = "NUMERICAL_ERROR"
    SEQUENCE_UNKNOWN = "SEQUENCE_UNKNOWN"
    SEQUENCE_EXISTS = "SEQUENCE_EXISTS"
    CONTEXT_EXCEEDED = "CONTEXT_EXCEEDED"
    DRAINING = "DRAINING"
    NO_REPLICA = "NO_REPLICA"
    REPLICA_LOST = "REPLICA_LOST"
    DEADLINE = "DEADLINE"
    CANCELLED = "CANCELLED"
    ENGINE_FAILED = "ENGINE_FAILED"
    API_KEY_MISSING = "API_KEY_MISSING"
    API_KEY_INVALID = "API_KEY_INVALID"
    NOT_ALLOWED = "NOT_ALLOWED"
    RATE_LIMITED = "RATE_LIMITED"
    CLIENT_TOO_SLOW = "CLIENT_TOO_SLOW"
    DEADLINE_TOO_SOON = "DEADLINE_TOO_SOON"


@dataclass(frozen=True)
class FieldViolation:
    """One field that was refused: `field` is its path in the request, `description` says the limit."""

    field: str
    description: str


class SpecdecodeError(Exception):
    """Base of every error a caller may see.

    Attributes:
        reason: constant reason for machines.
        violations: the fields that were refused, for `InvalidArgumentError`.
        retry_after: seconds after which trying again may help, or None.
    """

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    default_reason: ClassVar[Reason] = Reason.ENGINE_FAILED

    def __init__(
        self,
        message: str,
        *,
        reason: Reason | None = None,
        violations: tuple[FieldViolation, ...] = (),
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.violations = violations
        self.retry_after = retry_after


class InvalidArgumentError(SpecdecodeError):
    """A request names something outside its range; nothing was started."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    default_reason = Reason.INVALID_ARGUMENT

    @classmethod
    def of(cls, field: str, description: str, reason: Reason | None = None) -> InvalidArgumentError:
        """The error for one field; `description` states the value and the limit."""
        violations = (FieldViolation(field, description),)
        return cls(f"{field}: {description}", reason=reason, violations=violations)


class NotFoundError(SpecdecodeError):
    """A model, a file or a sequence that does not exist."""

    code = grpc.StatusCode.NOT_FOUND
    default_reason = Reason.MODEL_NOT_FOUND


class FailedPreconditionError(SpecdecodeError):
    """The pair of models, or this model on this engine, can't be served; waiting won't help."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    default_reason = Reason.MODEL_NOT_SUPPORTED


class ResourceExhaustedError(SpecdecodeError):
    """A bounded queue or the KV pool is too small for this request."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    default_reason = Reason.QUEUE_FULL


class UnavailableError(SpecdecodeError):
    """Nobody can serve this now; trying again may help."""

    code = grpc.StatusCode.UNAVAILABLE
    default_reason = Reason.NO_REPLICA


class DeadlineExceededError(SpecdecodeError):
    """The request's deadline passed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    default_reason = Reason.DEADLINE


class UnauthenticatedError(SpecdecodeError):
    """The caller has not shown who it is."""

    code = grpc.StatusCode.UNAUTHENTICATED
    default_reason = Reason.API_KEY_INVALID


class PermissionDeniedError(SpecdecodeError):
    """It is known who calls, and they may not do this."""

    code = grpc.StatusCode.PERMISSION_DENIED
    default_reason = Reason.NOT_ALLOWED


class CancelledError(SpecdecodeError):
    """The caller took the request back."""

    code = grpc.StatusCode.CANCELLED
    default_reason = Reason.CANCELLED


class InternalError(SpecdecodeError):
    """Something on our side failed; this request ends, others go on."""

    code = grpc.StatusCode.INTERNAL
    default_reason = Reason.ENGINE_FAILED


class NumericalError(InternalError):
    """The model's logits for this request hold NaN or infinity."""

    default_reason = Reason.NUMERICAL_ERROR
