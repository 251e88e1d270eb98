"""Frames between router and target (`target_service.proto`)."""

from __future__ import annotations

from specdecode.types import (
    DecodeFrame,
    Lease,
    OpenSequence,
    StepFrame,
    StepResult,
    Verify,
)
from specdecode.v1 import target_service_pb2 as pb
from specdecode.wire.parts import (
    FINISH_REASONS,
    METHODS,
    ORIGINS,
    check_open,
    distributions_to_proto,
    drafted_from_proto,
    load_snapshot_from_proto,
    load_snapshot_to_proto,
    refuse,
    sampling_from_proto,
    sampling_to_proto,
    step_costs_from_proto,
    step_costs_to_proto,
    step_times_from_proto,
    step_times_to_proto,
    token_logprobs_from_proto,
    token_logprobs_to_proto,
)
from specdecode.wire.status import sequence_error_from_proto, sequence_error_to_proto


def open_sequence_to_proto(order: OpenSequence) -> pb.OpenSequence:
    return pb.OpenSequence(
        sequence=order.sequence,
        token_ids=order.token_ids,
        num_prompt_tokens=order.num_prompt_tokens,
        sampling=sampling_to_proto(order.sampling),
        method=METHODS.to_proto(order.method),
        seed=order.seed,
        choice_index=order.choice_index,
        deadline=order.deadline,
        cache_salt=order.cache_salt,
        traceparent=order.traceparent,
        trust_draft=order.trust_draft,
    )


def open_sequence_from_proto(message: pb.OpenSequence, field: str = "open") -> OpenSequence:
    check_open(message, field)
    return OpenSequence(
        sequence=message.sequence,
        token_ids=tuple(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        sampling=sampling_from_proto(message.sampling),
        method=METHODS.from_proto(message.method, f"{field}.method"),
        seed=message.seed,
        choice_index=message.choice_index,
        deadline=message.deadline if message.HasField("deadline") else None,
        cache_salt=message.cache_salt,
        traceparent=message.traceparent,
        trust_draft=message.trust_draft,
    )


def verify_to_proto(order: Verify) -> pb.Verify:
    return pb.Verify(
        sequence=order.sequence,
        committed_length=order.committed_length,
        drafted=order.drafted,
        q=None if order.q is None else distributions_to_proto(order.q),
        span_id=order.span_id,
    )


def verify_from_proto(message: pb.Verify, field: str = "verify") -> Verify:
    drafted = tuple(message.drafted)
    q = drafted_from_proto(message, drafted, field, "drafted")
    return Verify(message.sequence, message.committed_length, drafted, q, message.span_id)


def lease_to_proto(order: Lease) -> pb.Lease:
    return pb.Lease(
        sequence=order.sequence,
        committed_length=order.committed_length,
        num_tokens=order.num_tokens,
        span_id=order.span_id,
    )


def lease_from_proto(message: pb.Lease) -> Lease:
    return Lease(message.sequence, message.committed_length, message.num_tokens, message.span_id)


def decode_frame_to_proto(frame: DecodeFrame) -> pb.DecodeRequest:
    return pb.DecodeRequest(
        opens=map(open_sequence_to_proto, frame.opens),
        verifies=map(verify_to_proto, frame.verifies),
        leases=map(lease_to_proto, frame.leases),
        closes=frame.closes,
    )


def decode_frame_from_proto(message: pb.DecodeRequest) -> DecodeFrame:
    return DecodeFrame(
        opens=tuple(open_sequence_from_proto(m, f"opens[{i}]") for i, m in enumerate(message.opens)),
        verifies=tuple(verify_from_proto(m, f"verifies[{i}]") for i, m in enumerate(message.verifies)),
        leases=tuple(map(lease_from_proto, message.leases)),
        closes=tuple(message.closes),
    )


def step_result_to_proto(result: StepResult) -> pb.StepResult:
    return pb.StepResult(
        sequence=result.sequence,
        committed_length=result.committed_length,
        token_ids=result.token_ids,
        origins=map(ORIGINS.to_proto, result.origins),
        num_drafted=result.num_drafted,
        num_accepted=result.num_accepted,
        tested=result.tested,
        passed=result.passed,
        logprobs=map(token_logprobs_to_proto, result.logprobs),
        lease_left=result.lease_left,
        times=step_times_to_proto(result.times),
        num_cached_tokens=result.num_cached_tokens,
        num_preemptions=result.num_preemptions,
        finish_reason=FINISH_REASONS.to_proto(result.finish_reason),
        error=sequence_error_to_proto(result.error),
    )


def step_result_from_proto(message: pb.StepResult, field: str = "result") -> StepResult:
    _check_step_result(message, field)
    return StepResult(
        sequence=message.sequence,
        committed_length=message.committed_length,
        token_ids=tuple(message.token_ids),
        origins=ORIGINS.all_from_proto(message.origins, f"{field}.origins"),
        num_drafted=message.num_drafted,
        num_accepted=message.num_accepted,
        tested=tuple(message.tested),
        passed=tuple(message.passed),
        logprobs=tuple(map(token_logprobs_from_proto, message.logprobs)),
        lease_left=message.lease_left,
        times=step_times_from_proto(message.times),
        num_cached_tokens=message.num_cached_tokens,
        num_preemptions=message.num_preemptions,
        finish_reason=FINISH_REASONS.optional_from_proto(message.finish_reason, f"{field}.finish_reason"),
        error=sequence_error_from_proto(message),
    )


def _check_step_result(message: pb.StepResult, field: str) -> None:
    num_tokens = len(message.token_ids)
    if len(message.origins) != num_tokens:
        raise refuse(f"{field}.origins", f"{len(message.origins)} origins for {num_tokens} tokens")
    if len(message.logprobs) not in (0, num_tokens):
        raise refuse(f"{field}.logprobs", f"{len(message.logprobs)} logprobs for {num_tokens} tokens")
    if len(message.tested) != len(message.passed):
        raise refuse(f"{field}.passed", f"{len(message.passed)} values for {len(message.tested)} tested")
    if message.num_accepted > message.num_drafted:
        raise refuse(
            f"{field}.num_accepted", f"{message.num_accepted}; at most {message.num_drafted} drafted"
        )


def step_frame_to_proto(frame: StepFrame) -> pb.DecodeResponse:
    return pb.DecodeResponse(
        step=frame.step,
        load=load_snapshot_to_proto(frame.load),
        results=map(step_result_to_proto, frame.results),
        costs=None if frame.costs is None else step_costs_to_proto(frame.costs),
    )


def step_frame_from_proto(message: pb.DecodeResponse) -> StepFrame:
    if not message.HasField("load"):
        raise refuse("load", "missing")
    return StepFrame(
        step=message.step,
        load=load_snapshot_from_proto(message.load),
        results=tuple(step_result_from_proto(m, f"results[{i}]") for i, m in enumerate(message.results)),
        costs=step_costs_from_proto(message.costs) if message.HasField("costs") else None,
    )
