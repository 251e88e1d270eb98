"""What messages of several services are made of (`types.proto`)."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Generic, TypeVar

import numpy as np

from specdecode.cost_tables import DraftCosts, StepCosts
from specdecode.errors import InvalidArgumentError
from specdecode.types import (
    MAX_DRAFT_TOKENS,
    DrafterKind,
    FinishReason,
    LoadSnapshot,
    Method,
    ModelInfo,
    Origin,
    SamplingParams,
    SparseDistributions,
    StepTimes,
    TokenLogprobs,
)
from specdecode.v1 import types_pb2 as pb

E = TypeVar("E", bound=Enum)


class EnumCodec(Generic[E]):
    """One Python enum and its protobuf twin, whose values carry the prefix and start with UNSPECIFIED = 0."""

    def __init__(self, enum: type[E], twin: Any, prefix: str) -> None:
        self._numbers: dict[E, int] = {member: twin.Value(f"{prefix}_{member.name}") for member in enum}
        self._members: dict[int, E] = {number: member for member, number in self._numbers.items()}

    def to_proto(self, member: E | None) -> Any:
        """The member's number; 0 (unspecified) for None."""
        return 0 if member is None else self._numbers[member]

    def from_proto(self, number: int, field: str) -> E:
        """The member; InvalidArgumentError naming `field` for unspecified and unknown numbers."""
        member = self._members.get(number)
        if member is None:
            raise InvalidArgumentError.of(field, self._refusal(number))
        return member

    def optional_from_proto(self, number: int, field: str) -> E | None:
        """As `from_proto`, with None for unspecified."""
        return None if number == 0 else self.from_proto(number, field)

    def all_from_proto(self, numbers: Sequence[int], field: str) -> tuple[E, ...]:
        """As `from_proto` for a repeated field."""
        try:
            return tuple(map(self._members.__getitem__, numbers))
        except KeyError as error:
            raise InvalidArgumentError.of(field, self._refusal(error.args[0])) from None

    def _refusal(self, number: int) -> str:
        return f"value {number} is refused; allowed: {', '.join(str(known) for known in self._members)}"


METHODS = EnumCodec(Method, pb.Method, "METHOD")
ORIGINS = EnumCodec(Origin, pb.Origin, "ORIGIN")
FINISH_REASONS = EnumCodec(FinishReason, pb.FinishReason, "FINISH_REASON")
DRAFTERS = EnumCodec(DrafterKind, pb.DrafterKind, "DRAFTER_KIND")


def refuse(field: str, description: str) -> InvalidArgumentError:
    return InvalidArgumentError.of(field, description)


def sampling_to_proto(sampling: SamplingParams) -> pb.ResolvedSampling:
    allowed = sampling.allowed_token_ids
    return pb.ResolvedSampling(
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=[pb.LogitBias(token_id=token, bias=bias) for token, bias in sampling.logit_bias],
        allowed_token_ids=None if allowed is None else pb.TokenIds(ids=allowed),
        banned_token_ids=sampling.banned_token_ids,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        logprobs=sampling.logprobs,
    )


def sampling_from_proto(message: pb.ResolvedSampling) -> SamplingParams:
    has_allowed = message.HasField("allowed_token_ids")
    return SamplingParams(
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple((entry.token_id, entry.bias) for entry in message.logit_bias),
        allowed_token_ids=tuple(message.allowed_token_ids.ids) if has_allowed else None,
        banned_token_ids=tuple(message.banned_token_ids),
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
    )


def distributions_to_proto(q: SparseDistributions) -> pb.SparseDistributions:
    return pb.SparseDistributions(
        sizes=q.sizes.tolist(),
        token_ids=q.token_ids.astype("<i4", copy=False).tobytes(),
        probs=q.probs.astype("<f4", copy=False).tobytes(),
    )


def distributions_from_proto(
    message: pb.SparseDistributions, num_drafted: int, field: str
) -> SparseDistributions:
    """q of `num_drafted` positions; the arrays are read-only views of the message's bytes."""
    sizes = list(message.sizes)
    if len(sizes) != num_drafted:
        raise refuse(f"{field}.sizes", f"{len(sizes)} sizes for {num_drafted} drafted tokens")
    if 0 in sizes:
        raise refuse(f"{field}.sizes", "a position without support; at least 1 token each")
    num_bytes = 4 * sum(sizes)
    for name, data in (("token_ids", message.token_ids), ("probs", message.probs)):
        if len(data) != num_bytes:
            raise refuse(f"{field}.{name}", f"{len(data)} bytes; sizes add up to {num_bytes} bytes")
    return SparseDistributions(
        sizes=np.array(sizes, dtype=np.int32),
        token_ids=np.frombuffer(message.token_ids, dtype="<i4").astype(np.int32, copy=False),
        probs=np.frombuffer(message.probs, dtype="<f4").astype(np.float32, copy=False),
    )


def drafted_from_proto(
    message: Any, token_ids: tuple[int, ...], field: str, name: str
) -> SparseDistributions | None:
    if len(token_ids) > MAX_DRAFT_TOKENS:
        raise refuse(f"{field}.{name}", f"{len(token_ids)} drafted tokens; at most {MAX_DRAFT_TOKENS}")
    if not message.HasField("q"):
        return None
    return distributions_from_proto(message.q, len(token_ids), f"{field}.q")


def check_open(message: Any, field: str) -> None:
    num_tokens, num_prompt_tokens = len(message.token_ids), message.num_prompt_tokens
    if num_tokens == 0:
        raise refuse(f"{field}.token_ids", "no tokens; at least 1")
    if not 1 <= num_prompt_tokens <= num_tokens:
        raise refuse(
            f"{field}.num_prompt_tokens", f"{num_prompt_tokens}; 1 to {num_tokens}, the tokens given"
        )
    if not message.HasField("sampling"):
        raise refuse(f"{field}.sampling", "missing")


def token_logprobs_to_proto(logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        token_id=logprobs.token_id,
        logprob=logprobs.logprob,
        rank=logprobs.rank,
        top=[pb.TopLogprob(token_id=token, logprob=logprob) for token, logprob in logprobs.top],
    )


def token_logprobs_from_proto(message: pb.TokenLogprobs) -> TokenLogprobs:
    top = tuple((entry.token_id, entry.logprob) for entry in message.top)
    return TokenLogprobs(message.token_id, message.logprob, message.rank, top)


def step_times_to_proto(times: StepTimes) -> pb.StepTimes:
    return pb.StepTimes(
        queue_seconds=times.queue,
        forward_seconds=times.forward,
        verify_seconds=times.verify,
        step_seconds=times.step,
    )


def step_times_from_proto(message: pb.StepTimes) -> StepTimes:
    return StepTimes(
        message.queue_seconds, message.forward_seconds, message.verify_seconds, message.step_seconds
    )


def load_snapshot_to_proto(load: LoadSnapshot) -> pb.LoadSnapshot:
    return pb.LoadSnapshot(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        tokens_in_flight=load.tokens_in_flight,
        num_rows=load.num_rows,
        num_cached_tokens=load.num_cached_tokens,
        num_free_blocks=load.num_free_blocks,
        num_blocks=load.num_blocks,
        step_seconds=load.step_seconds,
        num_ordered=load.num_ordered,
        num_ordered_tokens=load.num_ordered_tokens,
        num_prefill_tokens=load.num_prefill_tokens,
        expected_emitted=load.expected_emitted,
        price=load.price,
        idle_share=load.idle_share,
        cost_ratio=load.cost_ratio,
    )


def load_snapshot_from_proto(message: pb.LoadSnapshot) -> LoadSnapshot:
    return LoadSnapshot(
        num_running=message.num_running,
        num_waiting=message.num_waiting,
        tokens_in_flight=message.tokens_in_flight,
        num_rows=message.num_rows,
        num_cached_tokens=message.num_cached_tokens,
        num_free_blocks=message.num_free_blocks,
        num_blocks=message.num_blocks,
        step_seconds=message.step_seconds,
        num_ordered=message.num_ordered,
        num_ordered_tokens=message.num_ordered_tokens,
        num_prefill_tokens=message.num_prefill_tokens,
        expected_emitted=message.expected_emitted,
        price=message.price,
        idle_share=message.idle_share,
        cost_ratio=message.cost_ratio,
    )


def step_costs_to_proto(costs: StepCosts) -> pb.StepCosts:
    return pb.StepCosts(
        base_seconds=costs.base_seconds,
        token_seconds=costs.token_seconds,
        cached_token_seconds=costs.cached_token_seconds,
        overhead_seconds=costs.overhead_seconds,
        prefill_share=costs.prefill_share,
        tokens=costs.tokens,
        seconds=costs.seconds,
        buckets=costs.buckets,
        residual=costs.residual,
        sequence_seconds=costs.sequence_seconds,
        attention_seconds=costs.attention_seconds,
    )


def step_costs_from_proto(message: pb.StepCosts) -> StepCosts:
    """Without the samples, which stay where they were measured; the costs check themselves."""
    return StepCosts(
        base_seconds=message.base_seconds,
        token_seconds=message.token_seconds,
        cached_token_seconds=message.cached_token_seconds,
        overhead_seconds=message.overhead_seconds,
        prefill_share=message.prefill_share,
        tokens=tuple(message.tokens),
        seconds=tuple(message.seconds),
        buckets=tuple(message.buckets),
        residual=message.residual,
        sequence_seconds=message.sequence_seconds,
        attention_seconds=message.attention_seconds,
    )


def draft_costs_to_proto(costs: DraftCosts) -> pb.DraftCosts:
    return pb.DraftCosts(
        base_seconds=costs.base_seconds,
        pass_seconds=costs.pass_seconds,
        sequence_seconds=costs.sequence_seconds,
        token_seconds=costs.token_seconds,
        cached_token_seconds=costs.cached_token_seconds,
        single_pass=costs.single_pass,
        residual=costs.residual,
    )


def draft_costs_from_proto(message: pb.DraftCosts) -> DraftCosts:
    """As `step_costs_from_proto`."""
    return DraftCosts(
        base_seconds=message.base_seconds,
        pass_seconds=message.pass_seconds,
        sequence_seconds=message.sequence_seconds,
        token_seconds=message.token_seconds,
        cached_token_seconds=message.cached_token_seconds,
        single_pass=message.single_pass,
        residual=message.residual,
    )


def model_info_to_proto(info: ModelInfo) -> pb.ModelInfo:
    return pb.ModelInfo(
        name=info.name,
        fingerprint=info.fingerprint,
        vocab_size=info.vocab_size,
        max_length=info.max_length,
        dtype=info.dtype,
        device=info.device,
        eos_token_ids=info.eos_token_ids,
        drafters=map(DRAFTERS.to_proto, info.drafters),
        num_parameters=info.num_parameters,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        version=info.version,
        cores=info.cores,
    )


def model_info_from_proto(message: pb.ModelInfo) -> ModelInfo:
    return ModelInfo(
        name=message.name,
        fingerprint=message.fingerprint,
        vocab_size=message.vocab_size,
        max_length=message.max_length,
        dtype=message.dtype,
        device=message.device,
        eos_token_ids=tuple(message.eos_token_ids),
        drafters=DRAFTERS.all_from_proto(message.drafters, "drafters"),
        num_parameters=message.num_parameters,
        block_size=message.block_size,
        num_blocks=message.num_blocks,
        version=message.version,
        cores=message.cores,
    )
