"""Frames between router and draft service (`draft_service.proto`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from specdecode.cost_tables import DraftCosts
from specdecode.types import (
    MAX_DRAFT_TOKENS,
    Draft,
    DrafterKind,
    DraftFrame,
    DraftsFrame,
    OpenDraft,
    Propose,
)
from specdecode.v1 import draft_service_pb2 as pb
from specdecode.wire.parts import (
    DRAFTERS,
    METHODS,
    check_open,
    distributions_to_proto,
    draft_costs_from_proto,
    draft_costs_to_proto,
    drafted_from_proto,
    refuse,
    sampling_from_proto,
    sampling_to_proto,
)
from specdecode.wire.status import sequence_error_from_proto, sequence_error_to_proto


def open_draft_to_proto(order: OpenDraft) -> pb.OpenDraft:
    return pb.OpenDraft(
        sequence=order.sequence,
        token_ids=order.token_ids,
        num_prompt_tokens=order.num_prompt_tokens,
        sampling=sampling_to_proto(order.sampling),
        method=METHODS.to_proto(order.method),
        drafter=DRAFTERS.to_proto(order.drafter),
        seed=order.seed,
        choice_index=order.choice_index,
        traceparent=order.traceparent,
        cache_salt=order.cache_salt,
        traffic_class=order.traffic_class,
        remembers_output=order.remembers_output,
    )


def open_draft_from_proto(message: pb.OpenDraft, field: str = "open") -> OpenDraft:
    check_open(message, field)
    return OpenDraft(
        sequence=message.sequence,
        token_ids=tuple(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        sampling=sampling_from_proto(message.sampling),
        method=METHODS.from_proto(message.method, f"{field}.method"),
        drafter=DRAFTERS.from_proto(message.drafter, f"{field}.drafter"),
        seed=message.seed,
        choice_index=message.choice_index,
        traceparent=message.traceparent,
        cache_salt=message.cache_salt,
        traffic_class=message.traffic_class,
        remembers_output=message.remembers_output,
    )


def propose_to_proto(order: Propose) -> pb.Propose:
    return pb.Propose(
        sequence=order.sequence,
        from_length=order.from_length,
        token_ids=order.token_ids,
        num_draft_tokens=order.num_draft_tokens,
        span_id=order.span_id,
    )


def propose_from_proto(message: pb.Propose, field: str = "propose") -> Propose:
    if message.num_draft_tokens > MAX_DRAFT_TOKENS:
        limit = f"{message.num_draft_tokens}; at most {MAX_DRAFT_TOKENS}"
        raise refuse(f"{field}.num_draft_tokens", limit)
    return Propose(
        sequence=message.sequence,
        from_length=message.from_length,
        token_ids=tuple(message.token_ids),
        num_draft_tokens=message.num_draft_tokens,
        span_id=message.span_id,
    )


def draft_frame_to_proto(frame: DraftFrame) -> pb.DraftRequest:
    return pb.DraftRequest(
        opens=map(open_draft_to_proto, frame.opens),
        proposes=map(propose_to_proto, frame.proposes),
        closes=frame.closes,
    )


def draft_frame_from_proto(message: pb.DraftRequest) -> DraftFrame:
    return DraftFrame(
        opens=tuple(open_draft_from_proto(m, f"opens[{i}]") for i, m in enumerate(message.opens)),
        proposes=tuple(propose_from_proto(m, f"proposes[{i}]") for i, m in enumerate(message.proposes)),
        closes=tuple(message.closes),
    )


def draft_to_proto(draft: Draft) -> pb.ProposedDraft:
    return pb.ProposedDraft(
        sequence=draft.sequence,
        committed_length=draft.committed_length,
        token_ids=draft.token_ids,
        q=None if draft.q is None else distributions_to_proto(draft.q),
        draft_seconds=draft.seconds,
        error=sequence_error_to_proto(draft.error),
    )


def draft_from_proto(message: pb.ProposedDraft, field: str = "draft") -> Draft:
    token_ids = tuple(message.token_ids)
    return Draft(
        sequence=message.sequence,
        committed_length=message.committed_length,
        token_ids=token_ids,
        q=drafted_from_proto(message, token_ids, field, "token_ids"),
        seconds=message.draft_seconds,
        error=sequence_error_from_proto(message),
    )


def drafts_frame_to_proto(frame: DraftsFrame) -> pb.DraftResponse:
    return pb.DraftResponse(drafts=map(draft_to_proto, frame.drafts))


def drafts_frame_from_proto(message: pb.DraftResponse) -> DraftsFrame:
    return DraftsFrame(tuple(draft_from_proto(m, f"drafts[{i}]") for i, m in enumerate(message.drafts)))


def drafter_costs_to_proto(costs: Mapping[DrafterKind, DraftCosts]) -> list[pb.DrafterCosts]:
    return [
        pb.DrafterCosts(drafter=DRAFTERS.to_proto(kind), costs=draft_costs_to_proto(measured))
        for kind, measured in costs.items()
    ]


def drafter_costs_from_proto(
    messages: Iterable[pb.DrafterCosts], field: str = "costs"
) -> dict[DrafterKind, DraftCosts]:
    return {
        DRAFTERS.from_proto(m.drafter, f"{field}[{i}].drafter"): draft_costs_from_proto(m.costs)
        for i, m in enumerate(messages)
    }
