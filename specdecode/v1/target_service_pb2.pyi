from specdecode.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OpenSequence(_message.Message):
    __slots__ = ("sequence", "token_ids", "num_prompt_tokens", "sampling", "method", "seed", "choice_index", "deadline", "cache_salt", "traceparent", "trust_draft")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CHOICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRUST_DRAFT_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    sampling: _types_pb2.ResolvedSampling
    method: _types_pb2.Method
    seed: int
    choice_index: int
    deadline: float
    cache_salt: bytes
    traceparent: str
    trust_draft: bool
    def __init__(self, sequence: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_types_pb2.ResolvedSampling, _Mapping]] = ..., method: _Optional[_Union[_types_pb2.Method, str]] = ..., seed: _Optional[int] = ..., choice_index: _Optional[int] = ..., deadline: _Optional[float] = ..., cache_salt: _Optional[bytes] = ..., traceparent: _Optional[str] = ..., trust_draft: _Optional[bool] = ...) -> None: ...

class Verify(_message.Message):
    __slots__ = ("sequence", "committed_length", "drafted", "q", "span_id")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    Q_FIELD_NUMBER: _ClassVar[int]
    SPAN_ID_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    committed_length: int
    drafted: _containers.RepeatedScalarFieldContainer[int]
    q: _types_pb2.SparseDistributions
    span_id: int
    def __init__(self, sequence: _Optional[int] = ..., committed_length: _Optional[int] = ..., drafted: _Optional[_Iterable[int]] = ..., q: _Optional[_Union[_types_pb2.SparseDistributions, _Mapping]] = ..., span_id: _Optional[int] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("sequence", "committed_length", "num_tokens", "span_id")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPAN_ID_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    committed_length: int
    num_tokens: int
    span_id: int
    def __init__(self, sequence: _Optional[int] = ..., committed_length: _Optional[int] = ..., num_tokens: _Optional[int] = ..., span_id: _Optional[int] = ...) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("opens", "verifies", "leases", "closes")
    OPENS_FIELD_NUMBER: _ClassVar[int]
    VERIFIES_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    CLOSES_FIELD_NUMBER: _ClassVar[int]
    opens: _containers.RepeatedCompositeFieldContainer[OpenSequence]
    verifies: _containers.RepeatedCompositeFieldContainer[Verify]
    leases: _containers.RepeatedCompositeFieldContainer[Lease]
    closes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, opens: _Optional[_Iterable[_Union[OpenSequence, _Mapping]]] = ..., verifies: _Optional[_Iterable[_Union[Verify, _Mapping]]] = ..., leases: _Optional[_Iterable[_Union[Lease, _Mapping]]] = ..., closes: _Optional[_Iterable[int]] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("sequence", "committed_length", "token_ids", "origins", "num_drafted", "num_accepted", "tested", "passed", "logprobs", "lease_left", "times", "num_cached_tokens", "num_preemptions", "finish_reason", "error")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ORIGINS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    TESTED_FIELD_NUMBER: _ClassVar[int]
    PASSED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LEASE_LEFT_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    committed_length: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    origins: _containers.RepeatedScalarFieldContainer[_types_pb2.Origin]
    num_drafted: int
    num_accepted: int
    tested: _containers.RepeatedScalarFieldContainer[float]
    passed: _containers.RepeatedScalarFieldContainer[float]
    logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenLogprobs]
    lease_left: int
    times: _types_pb2.StepTimes
    num_cached_tokens: int
    num_preemptions: int
    finish_reason: _types_pb2.FinishReason
    error: _types_pb2.SequenceError
    def __init__(self, sequence: _Optional[int] = ..., committed_length: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., origins: _Optional[_Iterable[_Union[_types_pb2.Origin, str]]] = ..., num_drafted: _Optional[int] = ..., num_accepted: _Optional[int] = ..., tested: _Optional[_Iterable[float]] = ..., passed: _Optional[_Iterable[float]] = ..., logprobs: _Optional[_Iterable[_Union[_types_pb2.TokenLogprobs, _Mapping]]] = ..., lease_left: _Optional[int] = ..., times: _Optional[_Union[_types_pb2.StepTimes, _Mapping]] = ..., num_cached_tokens: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., finish_reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., error: _Optional[_Union[_types_pb2.SequenceError, _Mapping]] = ...) -> None: ...

class DecodeResponse(_message.Message):
    __slots__ = ("step", "load", "results", "costs")
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    step: int
    load: _types_pb2.LoadSnapshot
    results: _containers.RepeatedCompositeFieldContainer[StepResult]
    costs: _types_pb2.StepCosts
    def __init__(self, step: _Optional[int] = ..., load: _Optional[_Union[_types_pb2.LoadSnapshot, _Mapping]] = ..., results: _Optional[_Iterable[_Union[StepResult, _Mapping]]] = ..., costs: _Optional[_Union[_types_pb2.StepCosts, _Mapping]] = ...) -> None: ...

class GetTargetModelRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTargetModelResponse(_message.Message):
    __slots__ = ("model", "load", "costs")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    model: _types_pb2.ModelInfo
    load: _types_pb2.LoadSnapshot
    costs: _types_pb2.StepCosts
    def __init__(self, model: _Optional[_Union[_types_pb2.ModelInfo, _Mapping]] = ..., load: _Optional[_Union[_types_pb2.LoadSnapshot, _Mapping]] = ..., costs: _Optional[_Union[_types_pb2.StepCosts, _Mapping]] = ...) -> None: ...
