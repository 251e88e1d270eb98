from google.rpc import status_pb2 as _status_pb2
from specdecode.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SpeculationMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPECULATION_MODE_UNSPECIFIED: _ClassVar[SpeculationMode]
    SPECULATION_MODE_AUTO: _ClassVar[SpeculationMode]
    SPECULATION_MODE_ON: _ClassVar[SpeculationMode]
    SPECULATION_MODE_OFF: _ClassVar[SpeculationMode]

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_INTERACTIVE: _ClassVar[Tier]
    TIER_BATCH: _ClassVar[Tier]

class TraceDetail(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRACE_DETAIL_UNSPECIFIED: _ClassVar[TraceDetail]
    TRACE_DETAIL_ROUNDS: _ClassVar[TraceDetail]
    TRACE_DETAIL_EVENTS: _ClassVar[TraceDetail]
    TRACE_DETAIL_REQUEST: _ClassVar[TraceDetail]
SPECULATION_MODE_UNSPECIFIED: SpeculationMode
SPECULATION_MODE_AUTO: SpeculationMode
SPECULATION_MODE_ON: SpeculationMode
SPECULATION_MODE_OFF: SpeculationMode
TIER_UNSPECIFIED: Tier
TIER_INTERACTIVE: Tier
TIER_BATCH: Tier
TRACE_DETAIL_UNSPECIFIED: TraceDetail
TRACE_DETAIL_ROUNDS: TraceDetail
TRACE_DETAIL_EVENTS: TraceDetail
TRACE_DETAIL_REQUEST: TraceDetail

class ToolCall(_message.Message):
    __slots__ = ("id", "name", "arguments")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    arguments: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "tool_calls", "tool_call_id", "name")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tool_call_id: str
    name: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tool_call_id: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class Tool(_message.Message):
    __slots__ = ("name", "description", "parameters")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    parameters: str
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., parameters: _Optional[str] = ...) -> None: ...

class ChatPrompt(_message.Message):
    __slots__ = ("messages", "tools")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    tools: _containers.RepeatedCompositeFieldContainer[Tool]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., tools: _Optional[_Iterable[_Union[Tool, _Mapping]]] = ...) -> None: ...

class SamplingOptions(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "banned_token_ids", "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "logprobs", "seed")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BANNED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[_types_pb2.LogitBias]
    allowed_token_ids: _types_pb2.TokenIds
    banned_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: int
    min_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    logprobs: int
    seed: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[_types_pb2.LogitBias, _Mapping]]] = ..., allowed_token_ids: _Optional[_Union[_types_pb2.TokenIds, _Mapping]] = ..., banned_token_ids: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., logprobs: _Optional[int] = ..., seed: _Optional[int] = ...) -> None: ...

class SpeculationOptions(_message.Message):
    __slots__ = ("mode", "num_draft_tokens", "drafter", "method", "min_acceptance", "tier", "traffic_class", "remember_output")
    MODE_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    MIN_ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_CLASS_FIELD_NUMBER: _ClassVar[int]
    REMEMBER_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    mode: SpeculationMode
    num_draft_tokens: int
    drafter: _types_pb2.DrafterKind
    method: _types_pb2.Method
    min_acceptance: float
    tier: Tier
    traffic_class: str
    remember_output: bool
    def __init__(self, mode: _Optional[_Union[SpeculationMode, str]] = ..., num_draft_tokens: _Optional[int] = ..., drafter: _Optional[_Union[_types_pb2.DrafterKind, str]] = ..., method: _Optional[_Union[_types_pb2.Method, str]] = ..., min_acceptance: _Optional[float] = ..., tier: _Optional[_Union[Tier, str]] = ..., traffic_class: _Optional[str] = ..., remember_output: _Optional[bool] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("text", "chat", "token_ids", "sampling", "speculation", "n", "model", "include_rounds", "cache_salt", "include_report", "trace_detail", "conversation")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_REPORT_FIELD_NUMBER: _ClassVar[int]
    TRACE_DETAIL_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    text: str
    chat: ChatPrompt
    token_ids: _types_pb2.TokenIds
    sampling: SamplingOptions
    speculation: SpeculationOptions
    n: int
    model: str
    include_rounds: bool
    cache_salt: bytes
    include_report: bool
    trace_detail: TraceDetail
    conversation: str
    def __init__(self, text: _Optional[str] = ..., chat: _Optional[_Union[ChatPrompt, _Mapping]] = ..., token_ids: _Optional[_Union[_types_pb2.TokenIds, _Mapping]] = ..., sampling: _Optional[_Union[SamplingOptions, _Mapping]] = ..., speculation: _Optional[_Union[SpeculationOptions, _Mapping]] = ..., n: _Optional[int] = ..., model: _Optional[str] = ..., include_rounds: _Optional[bool] = ..., cache_salt: _Optional[bytes] = ..., include_report: _Optional[bool] = ..., trace_detail: _Optional[_Union[TraceDetail, str]] = ..., conversation: _Optional[str] = ...) -> None: ...

class EmittedToken(_message.Message):
    __slots__ = ("token_id", "origin", "logprobs")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    origin: _types_pb2.Origin
    logprobs: _types_pb2.TokenLogprobs
    def __init__(self, token_id: _Optional[int] = ..., origin: _Optional[_Union[_types_pb2.Origin, str]] = ..., logprobs: _Optional[_Union[_types_pb2.TokenLogprobs, _Mapping]] = ...) -> None: ...

class RoundRecord(_message.Message):
    __slots__ = ("index", "num_drafted", "num_accepted", "num_emitted", "last_origin", "drafter", "reason", "round_seconds", "draft_seconds", "times", "predicted_emitted", "predicted_seconds", "price", "tokens_in_flight")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    NUM_EMITTED_FIELD_NUMBER: _ClassVar[int]
    LAST_ORIGIN_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ROUND_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_EMITTED_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PRICE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    index: int
    num_drafted: int
    num_accepted: int
    num_emitted: int
    last_origin: _types_pb2.Origin
    drafter: _types_pb2.DrafterKind
    reason: str
    round_seconds: float
    draft_seconds: float
    times: _types_pb2.StepTimes
    predicted_emitted: float
    predicted_seconds: float
    price: float
    tokens_in_flight: int
    def __init__(self, index: _Optional[int] = ..., num_drafted: _Optional[int] = ..., num_accepted: _Optional[int] = ..., num_emitted: _Optional[int] = ..., last_origin: _Optional[_Union[_types_pb2.Origin, str]] = ..., drafter: _Optional[_Union[_types_pb2.DrafterKind, str]] = ..., reason: _Optional[str] = ..., round_seconds: _Optional[float] = ..., draft_seconds: _Optional[float] = ..., times: _Optional[_Union[_types_pb2.StepTimes, _Mapping]] = ..., predicted_emitted: _Optional[float] = ..., predicted_seconds: _Optional[float] = ..., price: _Optional[float] = ..., tokens_in_flight: _Optional[int] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("num_prompt_tokens", "num_cached_tokens", "num_emitted", "num_accepted", "num_bonus", "num_recovered", "num_plain", "num_drafted", "num_rounds", "num_failovers", "num_preemptions")
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_EMITTED_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    NUM_BONUS_FIELD_NUMBER: _ClassVar[int]
    NUM_RECOVERED_FIELD_NUMBER: _ClassVar[int]
    NUM_PLAIN_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILOVERS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_emitted: int
    num_accepted: int
    num_bonus: int
    num_recovered: int
    num_plain: int
    num_drafted: int
    num_rounds: int
    num_failovers: int
    num_preemptions: int
    def __init__(self, num_prompt_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_emitted: _Optional[int] = ..., num_accepted: _Optional[int] = ..., num_bonus: _Optional[int] = ..., num_recovered: _Optional[int] = ..., num_plain: _Optional[int] = ..., num_drafted: _Optional[int] = ..., num_rounds: _Optional[int] = ..., num_failovers: _Optional[int] = ..., num_preemptions: _Optional[int] = ...) -> None: ...

class Move(_message.Message):
    __slots__ = ("address", "reason", "num_emitted")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_EMITTED_FIELD_NUMBER: _ClassVar[int]
    address: str
    reason: str
    num_emitted: int
    def __init__(self, address: _Optional[str] = ..., reason: _Optional[str] = ..., num_emitted: _Optional[int] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "choice", "text", "tokens", "rounds", "finish_reason", "stop", "usage", "error", "report", "moves")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    choice: int
    text: str
    tokens: _containers.RepeatedCompositeFieldContainer[EmittedToken]
    rounds: _containers.RepeatedCompositeFieldContainer[RoundRecord]
    finish_reason: _types_pb2.FinishReason
    stop: str
    usage: Usage
    error: _status_pb2.Status
    report: SpeculationReport
    moves: _containers.RepeatedCompositeFieldContainer[Move]
    def __init__(self, request_id: _Optional[str] = ..., choice: _Optional[int] = ..., text: _Optional[str] = ..., tokens: _Optional[_Iterable[_Union[EmittedToken, _Mapping]]] = ..., rounds: _Optional[_Iterable[_Union[RoundRecord, _Mapping]]] = ..., finish_reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., stop: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., report: _Optional[_Union[SpeculationReport, _Mapping]] = ..., moves: _Optional[_Iterable[_Union[Move, _Mapping]]] = ...) -> None: ...

class FigureLabel(_message.Message):
    __slots__ = ("temperature", "traffic_class", "drafter", "method")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_CLASS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    temperature: str
    traffic_class: str
    drafter: _types_pb2.DrafterKind
    method: _types_pb2.Method
    def __init__(self, temperature: _Optional[str] = ..., traffic_class: _Optional[str] = ..., drafter: _Optional[_Union[_types_pb2.DrafterKind, str]] = ..., method: _Optional[_Union[_types_pb2.Method, str]] = ...) -> None: ...

class AcceptedRuns(_message.Message):
    __slots__ = ("num_drafted", "num_rounds")
    NUM_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    num_drafted: int
    num_rounds: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, num_drafted: _Optional[int] = ..., num_rounds: _Optional[_Iterable[int]] = ...) -> None: ...

class ReasonCount(_message.Message):
    __slots__ = ("reason", "num_rounds")
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    num_rounds: int
    def __init__(self, reason: _Optional[str] = ..., num_rounds: _Optional[int] = ...) -> None: ...

class Predictions(_message.Message):
    __slots__ = ("num_rounds", "predicted_emitted", "predicted_seconds", "emitted", "seconds")
    NUM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_EMITTED_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EMITTED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    num_rounds: int
    predicted_emitted: float
    predicted_seconds: float
    emitted: int
    seconds: float
    def __init__(self, num_rounds: _Optional[int] = ..., predicted_emitted: _Optional[float] = ..., predicted_seconds: _Optional[float] = ..., emitted: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class Regret(_message.Message):
    __slots__ = ("num_rounds", "expected", "lost")
    NUM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    num_rounds: int
    expected: float
    lost: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, num_rounds: _Optional[int] = ..., expected: _Optional[float] = ..., lost: _Optional[_Iterable[float]] = ...) -> None: ...

class Figures(_message.Message):
    __slots__ = ("label", "runs", "num_emitted", "num_recovered", "num_cut", "num_fallbacks", "tested", "passed", "reasons", "seconds", "draft_seconds", "step_seconds", "target_flops", "predictions", "regret", "num_timed", "timed_emitted")
    LABEL_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    NUM_EMITTED_FIELD_NUMBER: _ClassVar[int]
    NUM_RECOVERED_FIELD_NUMBER: _ClassVar[int]
    NUM_CUT_FIELD_NUMBER: _ClassVar[int]
    NUM_FALLBACKS_FIELD_NUMBER: _ClassVar[int]
    TESTED_FIELD_NUMBER: _ClassVar[int]
    PASSED_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TARGET_FLOPS_FIELD_NUMBER: _ClassVar[int]
    PREDICTIONS_FIELD_NUMBER: _ClassVar[int]
    REGRET_FIELD_NUMBER: _ClassVar[int]
    NUM_TIMED_FIELD_NUMBER: _ClassVar[int]
    TIMED_EMITTED_FIELD_NUMBER: _ClassVar[int]
    label: FigureLabel
    runs: _containers.RepeatedCompositeFieldContainer[AcceptedRuns]
    num_emitted: int
    num_recovered: int
    num_cut: int
    num_fallbacks: int
    tested: _containers.RepeatedScalarFieldContainer[float]
    passed: _containers.RepeatedScalarFieldContainer[float]
    reasons: _containers.RepeatedCompositeFieldContainer[ReasonCount]
    seconds: float
    draft_seconds: float
    step_seconds: float
    target_flops: float
    predictions: Predictions
    regret: Regret
    num_timed: int
    timed_emitted: int
    def __init__(self, label: _Optional[_Union[FigureLabel, _Mapping]] = ..., runs: _Optional[_Iterable[_Union[AcceptedRuns, _Mapping]]] = ..., num_emitted: _Optional[int] = ..., num_recovered: _Optional[int] = ..., num_cut: _Optional[int] = ..., num_fallbacks: _Optional[int] = ..., tested: _Optional[_Iterable[float]] = ..., passed: _Optional[_Iterable[float]] = ..., reasons: _Optional[_Iterable[_Union[ReasonCount, _Mapping]]] = ..., seconds: _Optional[float] = ..., draft_seconds: _Optional[float] = ..., step_seconds: _Optional[float] = ..., target_flops: _Optional[float] = ..., predictions: _Optional[_Union[Predictions, _Mapping]] = ..., regret: _Optional[_Union[Regret, _Mapping]] = ..., num_timed: _Optional[int] = ..., timed_emitted: _Optional[int] = ...) -> None: ...

class SpeculationReport(_message.Message):
    __slots__ = ("figures",)
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    figures: _containers.RepeatedCompositeFieldContainer[Figures]
    def __init__(self, figures: _Optional[_Iterable[_Union[Figures, _Mapping]]] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReplicaStatus(_message.Message):
    __slots__ = ("address", "connected", "model", "load", "num_sequences")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    address: str
    connected: bool
    model: _types_pb2.ModelInfo
    load: _types_pb2.LoadSnapshot
    num_sequences: int
    def __init__(self, address: _Optional[str] = ..., connected: _Optional[bool] = ..., model: _Optional[_Union[_types_pb2.ModelInfo, _Mapping]] = ..., load: _Optional[_Union[_types_pb2.LoadSnapshot, _Mapping]] = ..., num_sequences: _Optional[int] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("targets", "drafts", "num_requests", "version")
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    targets: _containers.RepeatedCompositeFieldContainer[ReplicaStatus]
    drafts: _containers.RepeatedCompositeFieldContainer[ReplicaStatus]
    num_requests: int
    version: str
    def __init__(self, targets: _Optional[_Iterable[_Union[ReplicaStatus, _Mapping]]] = ..., drafts: _Optional[_Iterable[_Union[ReplicaStatus, _Mapping]]] = ..., num_requests: _Optional[int] = ..., version: _Optional[str] = ...) -> None: ...

class GetFiguresRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetFiguresResponse(_message.Message):
    __slots__ = ("figures",)
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    figures: _containers.RepeatedCompositeFieldContainer[Figures]
    def __init__(self, figures: _Optional[_Iterable[_Union[Figures, _Mapping]]] = ...) -> None: ...

class DrafterLimit(_message.Message):
    __slots__ = ("drafter", "min_acceptance")
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    MIN_ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    drafter: _types_pb2.DrafterKind
    min_acceptance: float
    def __init__(self, drafter: _Optional[_Union[_types_pb2.DrafterKind, str]] = ..., min_acceptance: _Optional[float] = ...) -> None: ...

class Policy(_message.Message):
    __slots__ = ("enabled", "num_draft_tokens", "max_draft_tokens", "max_tokens_in_flight", "min_acceptance", "min_acceptances", "max_temperature", "lease_seconds", "batch_weight")
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    MIN_ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    MIN_ACCEPTANCES_FIELD_NUMBER: _ClassVar[int]
    MAX_TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BATCH_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    enabled: bool
    num_draft_tokens: int
    max_draft_tokens: int
    max_tokens_in_flight: int
    min_acceptance: float
    min_acceptances: _containers.RepeatedCompositeFieldContainer[DrafterLimit]
    max_temperature: float
    lease_seconds: float
    batch_weight: float
    def __init__(self, enabled: _Optional[bool] = ..., num_draft_tokens: _Optional[int] = ..., max_draft_tokens: _Optional[int] = ..., max_tokens_in_flight: _Optional[int] = ..., min_acceptance: _Optional[float] = ..., min_acceptances: _Optional[_Iterable[_Union[DrafterLimit, _Mapping]]] = ..., max_temperature: _Optional[float] = ..., lease_seconds: _Optional[float] = ..., batch_weight: _Optional[float] = ...) -> None: ...

class GetPolicyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetPolicyResponse(_message.Message):
    __slots__ = ("policy",)
    POLICY_FIELD_NUMBER: _ClassVar[int]
    policy: Policy
    def __init__(self, policy: _Optional[_Union[Policy, _Mapping]] = ...) -> None: ...

class SetPolicyRequest(_message.Message):
    __slots__ = ("policy",)
    POLICY_FIELD_NUMBER: _ClassVar[int]
    policy: Policy
    def __init__(self, policy: _Optional[_Union[Policy, _Mapping]] = ...) -> None: ...

class SetPolicyResponse(_message.Message):
    __slots__ = ("policy",)
    POLICY_FIELD_NUMBER: _ClassVar[int]
    policy: Policy
    def __init__(self, policy: _Optional[_Union[Policy, _Mapping]] = ...) -> None: ...
