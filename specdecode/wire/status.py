"""Errors as `google.rpc.Status` and back."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from specdecode.errors import (
    ERROR_DOMAIN,
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    FieldViolation,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    NumericalError,
    PermissionDeniedError,
    Reason,
    ResourceExhaustedError,
    SpecdecodeError,
    UnauthenticatedError,
    UnavailableError,
)
from specdecode.v1 import types_pb2 as pb

# A status travels in HTTP/2 trailers, which many clients cap at 8 KiB, as text and once more as base64.
_MAX_MESSAGE_BYTES = 768
_MAX_DESCRIPTION_BYTES = 256
_MAX_VIOLATIONS = 6

_ERRORS_BY_CODE: dict[int, type[SpecdecodeError]] = {
    error.code.value[0]: error
    for error in (
        InvalidArgumentError,
        NotFoundError,
        FailedPreconditionError,
        ResourceExhaustedError,
        UnavailableError,
        DeadlineExceededError,
        UnauthenticatedError,
        PermissionDeniedError,
        CancelledError,
        InternalError,
    )
}


def error_to_proto(error: SpecdecodeError) -> status_pb2.Status:
    """`google.rpc.Status` with ErrorInfo, and BadRequest and RetryInfo if they apply; long texts are cut."""
    status = status_pb2.Status(code=error.code.value[0], message=_cut(error.message, _MAX_MESSAGE_BYTES))
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN))
    if error.violations:
        bad_request = error_details_pb2.BadRequest()
        for violation in error.violations[:_MAX_VIOLATIONS]:
            bad_request.field_violations.add(
                field=_cut(violation.field, _MAX_DESCRIPTION_BYTES),
                description=_cut(violation.description, _MAX_DESCRIPTION_BYTES),
            )
        status.details.add().Pack(bad_request)
    if error.retry_after is not None:
        retry_info = error_details_pb2.RetryInfo()
        seconds, nanos = divmod(round(error.retry_after * 1e9), 10**9)
        retry_info.retry_delay.seconds, retry_info.retry_delay.nanos = seconds, nanos
        status.details.add().Pack(retry_info)
    return status


def error_from_proto(status: status_pb2.Status) -> SpecdecodeError:
    """The error a status stands for; codes and reasons this version doesn't know become InternalError's."""
    info = _detail(status, error_details_pb2.ErrorInfo)
    bad_request = _detail(status, error_details_pb2.BadRequest)
    retry_info = _detail(status, error_details_pb2.RetryInfo)
    kind = _ERRORS_BY_CODE.get(status.code, InternalError)
    known = info is not None and info.domain == ERROR_DOMAIN and info.reason in Reason.__members__
    reason = Reason(info.reason) if known else None
    if reason is Reason.NUMERICAL_ERROR:
        kind = NumericalError
    violations = () if bad_request is None else bad_request.field_violations
    delay = None if retry_info is None else retry_info.retry_delay
    return kind(
        status.message,
        reason=reason,
        violations=tuple(FieldViolation(entry.field, entry.description) for entry in violations),
        retry_after=None if delay is None else delay.seconds + delay.nanos / 1e9,
    )


def _detail(status: status_pb2.Status, kind: Any) -> Any:
    """The first detail of this kind, None without one; a detail that can't be parsed counts as absent."""
    for packed in status.details:
        if packed.Is(kind.DESCRIPTOR):
            detail = kind()
            try:
                packed.Unpack(detail)
            except DecodeError:
                return None
            return detail
    return None


def _cut(text: str, max_bytes: int) -> str:
    data = text.encode("utf-8", "replace")
    if len(data) <= max_bytes:
        return data.decode("utf-8")
    return data[: max_bytes - 3].decode("utf-8", "ignore") + "..."


def sequence_error_to_proto(error: SpecdecodeError | None) -> pb.SequenceError | None:
    return None if error is None else pb.SequenceError(status=error_to_proto(error))


def sequence_error_from_proto(message: Any) -> SpecdecodeError | None:
    return error_from_proto(message.error.status) if message.HasField("error") else None
