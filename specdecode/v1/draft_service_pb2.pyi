from specdecode.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OpenDraft(_message.Message):
    __slots__ = ("sequence", "token_ids", "num_prompt_tokens", "sampling", "method", "drafter", "seed", "choice_index", "traceparent", "cache_salt", "traffic_class", "remembers_output")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CHOICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_CLASS_FIELD_NUMBER: _ClassVar[int]
    REMEMBERS_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    sampling: _types_pb2.ResolvedSampling
    method: _types_pb2.Method
    drafter: _types_pb2.DrafterKind
    seed: int
    choice_index: int
    traceparent: str
    cache_salt: bytes
    traffic_class: str
    remembers_output: bool
    def __init__(self, sequence: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_types_pb2.ResolvedSampling, _Mapping]] = ..., method: _Optional[_Union[_types_pb2.Method, str]] = ..., drafter: _Optional[_Union[_types_pb2.DrafterKind, str]] = ..., seed: _Optional[int] = ..., choice_index: _Optional[int] = ..., traceparent: _Optional[str] = ..., cache_salt: _Optional[bytes] = ..., traffic_class: _Optional[str] = ..., remembers_output: _Optional[bool] = ...) -> None: ...

class Propose(_message.Message):
    __slots__ = ("sequence", "from_length", "token_ids", "num_draft_tokens", "span_id")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    FROM_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPAN_ID_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    from_length: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_draft_tokens: int
    span_id: int
    def __init__(self, sequence: _Optional[int] = ..., from_length: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_draft_tokens: _Optional[int] = ..., span_id: _Optional[int] = ...) -> None: ...

class DraftRequest(_message.Message):
    __slots__ = ("opens", "proposes", "closes")
    OPENS_FIELD_NUMBER: _ClassVar[int]
    PROPOSES_FIELD_NUMBER: _ClassVar[int]
    CLOSES_FIELD_NUMBER: _ClassVar[int]
    opens: _containers.RepeatedCompositeFieldContainer[OpenDraft]
    proposes: _containers.RepeatedCompositeFieldContainer[Propose]
    closes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, opens: _Optional[_Iterable[_Union[OpenDraft, _Mapping]]] = ..., proposes: _Optional[_Iterable[_Union[Propose, _Mapping]]] = ..., closes: _Optional[_Iterable[int]] = ...) -> None: ...

class ProposedDraft(_message.Message):
    __slots__ = ("sequence", "committed_length", "token_ids", "q", "draft_seconds", "error")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    Q_FIELD_NUMBER: _ClassVar[int]
    DRAFT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    committed_length: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    q: _types_pb2.SparseDistributions
    draft_seconds: float
    error: _types_pb2.SequenceError
    def __init__(self, sequence: _Optional[int] = ..., committed_length: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., q: _Optional[_Union[_types_pb2.SparseDistributions, _Mapping]] = ..., draft_seconds: _Optional[float] = ..., error: _Optional[_Union[_types_pb2.SequenceError, _Mapping]] = ...) -> None: ...

class DraftResponse(_message.Message):
    __slots__ = ("drafts",)
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    drafts: _containers.RepeatedCompositeFieldContainer[ProposedDraft]
    def __init__(self, drafts: _Optional[_Iterable[_Union[ProposedDraft, _Mapping]]] = ...) -> None: ...

class GetDraftModelRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrafterCosts(_message.Message):
    __slots__ = ("drafter", "costs")
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    drafter: _types_pb2.DrafterKind
    costs: _types_pb2.DraftCosts
    def __init__(self, drafter: _Optional[_Union[_types_pb2.DrafterKind, str]] = ..., costs: _Optional[_Union[_types_pb2.DraftCosts, _Mapping]] = ...) -> None: ...

class GetDraftModelResponse(_message.Message):
    __slots__ = ("model", "costs")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    model: _types_pb2.ModelInfo
    costs: _containers.RepeatedCompositeFieldContainer[DrafterCosts]
    def __init__(self, model: _Optional[_Union[_types_pb2.ModelInfo, _Mapping]] = ..., costs: _Optional[_Iterable[_Union[DrafterCosts, _Mapping]]] = ...) -> None: ...
