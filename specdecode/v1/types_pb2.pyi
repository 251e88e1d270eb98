from google.rpc import status_pb2 as _status_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Method(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    METHOD_UNSPECIFIED: _ClassVar[Method]
    METHOD_GREEDY: _ClassVar[Method]
    METHOD_REJECTION: _ClassVar[Method]
    METHOD_BLOCK: _ClassVar[Method]
    METHOD_COUPLED: _ClassVar[Method]

class Origin(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ORIGIN_UNSPECIFIED: _ClassVar[Origin]
    ORIGIN_ACCEPTED: _ClassVar[Origin]
    ORIGIN_BONUS: _ClassVar[Origin]
    ORIGIN_RECOVERED: _ClassVar[Origin]
    ORIGIN_PLAIN: _ClassVar[Origin]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]

class DrafterKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DRAFTER_KIND_UNSPECIFIED: _ClassVar[DrafterKind]
    DRAFTER_KIND_NGRAM: _ClassVar[DrafterKind]
    DRAFTER_KIND_MODEL: _ClassVar[DrafterKind]
    DRAFTER_KIND_SUFFIX: _ClassVar[DrafterKind]
METHOD_UNSPECIFIED: Method
METHOD_GREEDY: Method
METHOD_REJECTION: Method
METHOD_BLOCK: Method
METHOD_COUPLED: Method
ORIGIN_UNSPECIFIED: Origin
ORIGIN_ACCEPTED: Origin
ORIGIN_BONUS: Origin
ORIGIN_RECOVERED: Origin
ORIGIN_PLAIN: Origin
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
DRAFTER_KIND_UNSPECIFIED: DrafterKind
DRAFTER_KIND_NGRAM: DrafterKind
DRAFTER_KIND_MODEL: DrafterKind
DRAFTER_KIND_SUFFIX: DrafterKind

class LogitBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ResolvedSampling(_message.Message):
    __slots__ = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "banned_token_ids", "temperature", "top_k", "top_p", "min_p", "max_tokens", "min_tokens", "stop_token_ids", "logprobs")
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BANNED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[LogitBias]
    allowed_token_ids: TokenIds
    banned_token_ids: _containers.RepeatedScalarFieldContainer[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    max_tokens: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: int
    def __init__(self, repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[LogitBias, _Mapping]]] = ..., allowed_token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., banned_token_ids: _Optional[_Iterable[int]] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[int] = ...) -> None: ...

class SparseDistributions(_message.Message):
    __slots__ = ("sizes", "token_ids", "probs")
    SIZES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROBS_FIELD_NUMBER: _ClassVar[int]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    token_ids: bytes
    probs: bytes
    def __init__(self, sizes: _Optional[_Iterable[int]] = ..., token_ids: _Optional[bytes] = ..., probs: _Optional[bytes] = ...) -> None: ...

class TopLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("token_id", "logprob", "rank", "top")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    rank: int
    top: _containers.RepeatedCompositeFieldContainer[TopLogprob]
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., rank: _Optional[int] = ..., top: _Optional[_Iterable[_Union[TopLogprob, _Mapping]]] = ...) -> None: ...

class StepTimes(_message.Message):
    __slots__ = ("queue_seconds", "forward_seconds", "verify_seconds", "step_seconds")
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    queue_seconds: float
    forward_seconds: float
    verify_seconds: float
    step_seconds: float
    def __init__(self, queue_seconds: _Optional[float] = ..., forward_seconds: _Optional[float] = ..., verify_seconds: _Optional[float] = ..., step_seconds: _Optional[float] = ...) -> None: ...

class LoadSnapshot(_message.Message):
    __slots__ = ("num_running", "num_waiting", "tokens_in_flight", "num_rows", "num_cached_tokens", "num_free_blocks", "num_blocks", "step_seconds", "num_ordered", "num_ordered_tokens", "num_prefill_tokens", "expected_emitted", "price", "idle_share", "cost_ratio")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    TOKENS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NUM_ORDERED_FIELD_NUMBER: _ClassVar[int]
    NUM_ORDERED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_EMITTED_FIELD_NUMBER: _ClassVar[int]
    PRICE_FIELD_NUMBER: _ClassVar[int]
    IDLE_SHARE_FIELD_NUMBER: _ClassVar[int]
    COST_RATIO_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    tokens_in_flight: int
    num_rows: int
    num_cached_tokens: int
    num_free_blocks: int
    num_blocks: int
    step_seconds: float
    num_ordered: int
    num_ordered_tokens: int
    num_prefill_tokens: int
    expected_emitted: float
    price: float
    idle_share: float
    cost_ratio: float
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., tokens_in_flight: _Optional[int] = ..., num_rows: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_blocks: _Optional[int] = ..., step_seconds: _Optional[float] = ..., num_ordered: _Optional[int] = ..., num_ordered_tokens: _Optional[int] = ..., num_prefill_tokens: _Optional[int] = ..., expected_emitted: _Optional[float] = ..., price: _Optional[float] = ..., idle_share: _Optional[float] = ..., cost_ratio: _Optional[float] = ...) -> None: ...

class StepCosts(_message.Message):
    __slots__ = ("base_seconds", "token_seconds", "cached_token_seconds", "overhead_seconds", "prefill_share", "tokens", "seconds", "buckets", "residual", "sequence_seconds", "attention_seconds")
    BASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    OVERHEAD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SHARE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    RESIDUAL_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_SECONDS_FIELD_NUMBER: _ClassVar[int]
    base_seconds: float
    token_seconds: float
    cached_token_seconds: float
    overhead_seconds: float
    prefill_share: float
    tokens: _containers.RepeatedScalarFieldContainer[int]
    seconds: _containers.RepeatedScalarFieldContainer[float]
    buckets: _containers.RepeatedScalarFieldContainer[int]
    residual: float
    sequence_seconds: float
    attention_seconds: float
    def __init__(self, base_seconds: _Optional[float] = ..., token_seconds: _Optional[float] = ..., cached_token_seconds: _Optional[float] = ..., overhead_seconds: _Optional[float] = ..., prefill_share: _Optional[float] = ..., tokens: _Optional[_Iterable[int]] = ..., seconds: _Optional[_Iterable[float]] = ..., buckets: _Optional[_Iterable[int]] = ..., residual: _Optional[float] = ..., sequence_seconds: _Optional[float] = ..., attention_seconds: _Optional[float] = ...) -> None: ...

class DraftCosts(_message.Message):
    __slots__ = ("base_seconds", "pass_seconds", "sequence_seconds", "token_seconds", "cached_token_seconds", "single_pass", "residual")
    BASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PASS_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SINGLE_PASS_FIELD_NUMBER: _ClassVar[int]
    RESIDUAL_FIELD_NUMBER: _ClassVar[int]
    base_seconds: float
    pass_seconds: float
    sequence_seconds: float
    token_seconds: float
    cached_token_seconds: float
    single_pass: bool
    residual: float
    def __init__(self, base_seconds: _Optional[float] = ..., pass_seconds: _Optional[float] = ..., sequence_seconds: _Optional[float] = ..., token_seconds: _Optional[float] = ..., cached_token_seconds: _Optional[float] = ..., single_pass: _Optional[bool] = ..., residual: _Optional[float] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("name", "fingerprint", "vocab_size", "max_length", "dtype", "device", "eos_token_ids", "drafters", "num_parameters", "block_size", "num_blocks", "version", "cores")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CORES_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: str
    vocab_size: int
    max_length: int
    dtype: str
    device: str
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    drafters: _containers.RepeatedScalarFieldContainer[DrafterKind]
    num_parameters: int
    block_size: int
    num_blocks: int
    version: str
    cores: str
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_length: _Optional[int] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., drafters: _Optional[_Iterable[_Union[DrafterKind, str]]] = ..., num_parameters: _Optional[int] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., version: _Optional[str] = ..., cores: _Optional[str] = ...) -> None: ...

class SequenceError(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: _status_pb2.Status
    def __init__(self, status: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...
