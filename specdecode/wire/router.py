"""What the router tells clients, and what clients tell it (`router_service.proto`).

Pieces are put on the wire by the router itself, from what it gathers them in.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from specdecode.errors import InvalidArgumentError
from specdecode.requests import (
    MAX_CHAT_MESSAGES,
    MAX_LISTED_TOKEN_IDS,
    MAX_LOGIT_BIASES,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_TOOLS,
    ChatMessage,
    ChatPrompt,
    EmittedToken,
    GenerateRequest,
    Move,
    Piece,
    Prompt,
    ReplicaStatus,
    RouterStatus,
    SamplingOptions,
    SpeculationMode,
    SpeculationOptions,
    TextPrompt,
    Tier,
    TokenPrompt,
    Tool,
    ToolCall,
    TraceDetail,
)
from specdecode.types import RoundRecord, Usage
from specdecode.v1 import router_service_pb2 as pb
from specdecode.v1 import types_pb2
from specdecode.wire.figures import figures_from_proto, figures_to_proto
from specdecode.wire.parts import (
    DRAFTERS,
    FINISH_REASONS,
    METHODS,
    ORIGINS,
    EnumCodec,
    load_snapshot_from_proto,
    load_snapshot_to_proto,
    model_info_from_proto,
    model_info_to_proto,
    step_times_from_proto,
    step_times_to_proto,
    token_logprobs_from_proto,
    token_logprobs_to_proto,
)
from specdecode.wire.status import error_from_proto, error_to_proto

MODES = EnumCodec(SpeculationMode, pb.SpeculationMode, "SPECULATION_MODE")
TIERS = EnumCodec(Tier, pb.Tier, "TIER")
TRACE_DETAILS = EnumCodec(TraceDetail, pb.TraceDetail, "TRACE_DETAIL")

_USAGE_FIELDS = tuple(field.name for field in pb.Usage.DESCRIPTOR.fields)


def usage_to_proto(usage: Usage) -> pb.Usage:
    return pb.Usage(**{name: getattr(usage, name) for name in _USAGE_FIELDS})


def usage_from_proto(message: pb.Usage) -> Usage:
    return Usage(**{name: getattr(message, name) for name in _USAGE_FIELDS})


def round_record_to_proto(record: RoundRecord) -> pb.RoundRecord:
    return pb.RoundRecord(
        index=record.index,
        num_drafted=record.num_drafted,
        num_accepted=record.num_accepted,
        num_emitted=record.num_emitted,
        last_origin=ORIGINS.to_proto(record.last_origin),
        drafter=DRAFTERS.to_proto(record.drafter),
        reason=record.reason,
        round_seconds=record.seconds,
        draft_seconds=record.draft_seconds,
        times=step_times_to_proto(record.times),
        predicted_emitted=record.predicted_emitted,
        predicted_seconds=record.predicted_seconds,
        price=record.price,
        tokens_in_flight=record.tokens_in_flight,
    )


def round_record_from_proto(message: pb.RoundRecord) -> RoundRecord:
    return RoundRecord(
        index=message.index,
        num_drafted=message.num_drafted,
        num_accepted=message.num_accepted,
        num_emitted=message.num_emitted,
        last_origin=ORIGINS.from_proto(message.last_origin, "last_origin"),
        drafter=DRAFTERS.optional_from_proto(message.drafter, "drafter"),
        reason=message.reason,
        seconds=message.round_seconds,
        draft_seconds=message.draft_seconds,
        times=step_times_from_proto(message.times),
        predicted_emitted=message.predicted_emitted,
        predicted_seconds=message.predicted_seconds,
        price=message.price,
        tokens_in_flight=message.tokens_in_flight,
    )


def generate_request_to_proto(request: GenerateRequest) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        **_prompt_to_proto(request.prompt),
        sampling=_sampling_options_to_proto(request.sampling),
        speculation=_speculation_options_to_proto(request.speculation),
        n=request.n,
        model=request.model,
        include_rounds=request.include_rounds,
        cache_salt=request.cache_salt,
        include_report=request.include_report,
        trace_detail=TRACE_DETAILS.to_proto(request.trace_detail),
        conversation=request.conversation,
    )


def _prompt_to_proto(prompt: Prompt | None) -> dict[str, Any]:
    match prompt:
        case TextPrompt(text):
            return {"text": text}
        case ChatPrompt(messages, tools):
            chat = pb.ChatPrompt(
                messages=map(_chat_message_to_proto, messages),
                tools=[
                    pb.Tool(name=tool.name, description=tool.description, parameters=tool.parameters)
                    for tool in tools
                ],
            )
            return {"chat": chat}
        case TokenPrompt(token_ids):
            return {"token_ids": types_pb2.TokenIds(ids=token_ids)}
        case None:
            return {}


def _chat_message_to_proto(message: ChatMessage) -> pb.ChatMessage:
    return pb.ChatMessage(
        role=message.role,
        content=message.content,
        tool_calls=[
            pb.ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in message.tool_calls
        ],
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def _sampling_options_to_proto(options: SamplingOptions) -> pb.SamplingOptions:
    allowed = options.allowed_token_ids
    return pb.SamplingOptions(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        logit_bias=[types_pb2.LogitBias(token_id=token, bias=bias) for token, bias in options.logit_bias],
        allowed_token_ids=None if allowed is None else types_pb2.TokenIds(ids=allowed),
        banned_token_ids=options.banned_token_ids,
        max_tokens=options.max_tokens,
        min_tokens=options.min_tokens,
        stop=options.stop,
        stop_token_ids=options.stop_token_ids,
        ignore_eos=options.ignore_eos,
        logprobs=options.logprobs,
        seed=options.seed,
    )


def _speculation_options_to_proto(options: SpeculationOptions) -> pb.SpeculationOptions:
    return pb.SpeculationOptions(
        mode=MODES.to_proto(options.mode),
        num_draft_tokens=options.num_draft_tokens,
        drafter=DRAFTERS.to_proto(options.drafter),
        method=METHODS.to_proto(options.method),
        min_acceptance=options.min_acceptance,
        tier=TIERS.to_proto(options.tier),
        traffic_class=options.traffic_class,
        remember_output=options.remember_output,
    )


def generate_request_from_proto(message: pb.GenerateRequest) -> GenerateRequest:
    """Options may still be out of range; lists are of bounded length.

    Raises:
        InvalidArgumentError: an enum's value is unknown, or a list is too long to be read.
    """
    options = message.speculation
    has_cap = options.HasField("num_draft_tokens")
    return GenerateRequest(
        prompt=_prompt_from_proto(message),
        sampling=_sampling_options_from_proto(message.sampling),
        speculation=SpeculationOptions(
            mode=MODES.optional_from_proto(options.mode, "speculation.mode") or SpeculationMode.AUTO,
            num_draft_tokens=options.num_draft_tokens if has_cap else None,
            drafter=DRAFTERS.optional_from_proto(options.drafter, "speculation.drafter"),
            method=METHODS.optional_from_proto(options.method, "speculation.method"),
            min_acceptance=options.min_acceptance if options.HasField("min_acceptance") else None,
            tier=TIERS.optional_from_proto(options.tier, "speculation.tier") or Tier.INTERACTIVE,
            traffic_class=options.traffic_class,
            remember_output=options.remember_output if options.HasField("remember_output") else True,
        ),
        n=message.n if message.HasField("n") else None,
        model=message.model,
        include_rounds=message.include_rounds,
        cache_salt=message.cache_salt,
        include_report=message.include_report,
        trace_detail=TRACE_DETAILS.optional_from_proto(message.trace_detail, "trace_detail"),
        conversation=message.conversation,
    )


def _prompt_from_proto(message: pb.GenerateRequest) -> Prompt | None:
    match message.WhichOneof("prompt"):
        case "text":
            return TextPrompt(message.text)
        case "chat":
            return _chat_prompt_from_proto(message.chat)
        case "token_ids":
            return TokenPrompt(tuple(message.token_ids.ids))
        case _:
            return None


def _chat_prompt_from_proto(chat: pb.ChatPrompt) -> ChatPrompt:
    _require_count("chat.messages", chat.messages, MAX_CHAT_MESSAGES, "messages")
    _require_count("chat.tools", chat.tools, MAX_TOOLS, "tools")
    tools = tuple(Tool(entry.name, entry.description, entry.parameters) for entry in chat.tools)
    return ChatPrompt(tuple(map(_chat_message_from_proto, chat.messages)), tools)


def _chat_message_from_proto(message: pb.ChatMessage) -> ChatMessage:
    calls = tuple(ToolCall(call.id, call.name, call.arguments) for call in message.tool_calls)
    return ChatMessage(message.role, message.content, calls, message.tool_call_id, message.name)


def _sampling_options_from_proto(message: pb.SamplingOptions) -> SamplingOptions:
    def given(name: str) -> Any:
        return getattr(message, name) if message.HasField(name) else None

    allowed, banned = message.allowed_token_ids.ids, message.banned_token_ids
    for name, entries, limit, what in (
        ("allowed_token_ids", allowed, MAX_LISTED_TOKEN_IDS, "ids"),
        ("banned_token_ids", banned, MAX_LISTED_TOKEN_IDS, "ids"),
        ("logit_bias", message.logit_bias, MAX_LOGIT_BIASES, "biases"),
        ("stop", message.stop, MAX_STOPS, "strings"),
        ("stop_token_ids", message.stop_token_ids, MAX_STOP_TOKEN_IDS, "ids"),
    ):
        _require_count(f"sampling.{name}", entries, limit, what)
    return SamplingOptions(
        temperature=given("temperature"),
        top_k=given("top_k"),
        top_p=given("top_p"),
        min_p=given("min_p"),
        repetition_penalty=given("repetition_penalty"),
        presence_penalty=given("presence_penalty"),
        frequency_penalty=given("frequency_penalty"),
        logit_bias=tuple((entry.token_id, entry.bias) for entry in message.logit_bias),
        allowed_token_ids=tuple(allowed) if message.HasField("allowed_token_ids") else None,
        banned_token_ids=tuple(banned),
        max_tokens=given("max_tokens"),
        min_tokens=given("min_tokens"),
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=bool(given("ignore_eos")),
        logprobs=given("logprobs"),
        seed=given("seed"),
    )


def _require_count(field: str, entries: Sized, limit: int, what: str) -> None:
    if len(entries) > limit:
        raise InvalidArgumentError.of(field, f"{len(entries)} {what}; at most {limit}")


def piece_to_proto(piece: Piece) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        request_id=piece.request_id,
        choice=piece.choice,
        text=piece.text,
        tokens=[
            pb.EmittedToken(
                token_id=token_id,
                origin=ORIGINS.to_proto(origin),
                logprobs=None if logprobs is None else token_logprobs_to_proto(logprobs),
            )
            for token_id, origin, logprobs in piece.tokens
        ],
        rounds=[round_record_to_proto(record) for record in piece.rounds],
        finish_reason=FINISH_REASONS.to_proto(piece.finish_reason),
        stop=piece.stop or "",
        usage=None if piece.usage is None else usage_to_proto(piece.usage),
        error=None if piece.error is None else error_to_proto(piece.error),
        report=(pb.SpeculationReport(figures=map(figures_to_proto, piece.report)) if piece.report else None),
        moves=[pb.Move(address=m.address, reason=m.reason, num_emitted=m.num_emitted) for m in piece.moves],
    )


def piece_from_proto(message: pb.GenerateResponse) -> Piece:
    return Piece(
        request_id=message.request_id,
        choice=message.choice,
        text=message.text,
        tokens=tuple(map(_emitted_token_from_proto, message.tokens)),
        rounds=tuple(map(round_record_from_proto, message.rounds)),
        finish_reason=FINISH_REASONS.optional_from_proto(message.finish_reason, "finish_reason"),
        stop=message.stop or None,
        usage=usage_from_proto(message.usage) if message.HasField("usage") else None,
        error=error_from_proto(message.error) if message.HasField("error") else None,
        report=tuple(map(figures_from_proto, message.report.figures)),
        moves=tuple(Move(move.address, move.reason, move.num_emitted) for move in message.moves),
    )


def _emitted_token_from_proto(message: pb.EmittedToken) -> EmittedToken:
    return EmittedToken(
        token_id=message.token_id,
        origin=ORIGINS.from_proto(message.origin, "tokens.origin"),
        logprobs=token_logprobs_from_proto(message.logprobs) if message.HasField("logprobs") else None,
    )


def router_status_to_proto(status: RouterStatus) -> pb.GetStatusResponse:
    return pb.GetStatusResponse(
        targets=map(_replica_status_to_proto, status.targets),
        drafts=map(_replica_status_to_proto, status.drafts),
        num_requests=status.num_requests,
        version=status.version,
    )


def _replica_status_to_proto(status: ReplicaStatus) -> pb.ReplicaStatus:
    return pb.ReplicaStatus(
        address=status.address,
        connected=status.connected,
        model=None if status.model is None else model_info_to_proto(status.model),
        load=None if status.load is None else load_snapshot_to_proto(status.load),
        num_sequences=status.num_sequences,
    )


def router_status_from_proto(message: pb.GetStatusResponse) -> RouterStatus:
    return RouterStatus(
        targets=tuple(map(_replica_status_from_proto, message.targets)),
        drafts=tuple(map(_replica_status_from_proto, message.drafts)),
        num_requests=message.num_requests,
        version=message.version,
    )


def _replica_status_from_proto(message: pb.ReplicaStatus) -> ReplicaStatus:
    return ReplicaStatus(
        address=message.address,
        connected=message.connected,
        model=model_info_from_proto(message.model) if message.HasField("model") else None,
        load=load_snapshot_from_proto(message.load) if message.HasField("load") else None,
        num_sequences=message.num_sequences,
    )
