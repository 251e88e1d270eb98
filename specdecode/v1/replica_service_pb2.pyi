from specdecode.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReplicaRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REPLICA_ROLE_UNSPECIFIED: _ClassVar[ReplicaRole]
    REPLICA_ROLE_TARGET: _ClassVar[ReplicaRole]
    REPLICA_ROLE_DRAFT: _ClassVar[ReplicaRole]

class ReplicaState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REPLICA_STATE_UNSPECIFIED: _ClassVar[ReplicaState]
    REPLICA_STATE_STARTING: _ClassVar[ReplicaState]
    REPLICA_STATE_CALIBRATING: _ClassVar[ReplicaState]
    REPLICA_STATE_READY: _ClassVar[ReplicaState]
    REPLICA_STATE_DRAINING: _ClassVar[ReplicaState]
    REPLICA_STATE_DEAD: _ClassVar[ReplicaState]
REPLICA_ROLE_UNSPECIFIED: ReplicaRole
REPLICA_ROLE_TARGET: ReplicaRole
REPLICA_ROLE_DRAFT: ReplicaRole
REPLICA_STATE_UNSPECIFIED: ReplicaState
REPLICA_STATE_STARTING: ReplicaState
REPLICA_STATE_CALIBRATING: ReplicaState
REPLICA_STATE_READY: ReplicaState
REPLICA_STATE_DRAINING: ReplicaState
REPLICA_STATE_DEAD: ReplicaState

class Replica(_message.Message):
    __slots__ = ("id", "role", "state", "address", "model", "load", "devices", "detail")
    ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    id: str
    role: ReplicaRole
    state: ReplicaState
    address: str
    model: _types_pb2.ModelInfo
    load: _types_pb2.LoadSnapshot
    devices: str
    detail: str
    def __init__(self, id: _Optional[str] = ..., role: _Optional[_Union[ReplicaRole, str]] = ..., state: _Optional[_Union[ReplicaState, str]] = ..., address: _Optional[str] = ..., model: _Optional[_Union[_types_pb2.ModelInfo, _Mapping]] = ..., load: _Optional[_Union[_types_pb2.LoadSnapshot, _Mapping]] = ..., devices: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class AnnounceRequest(_message.Message):
    __slots__ = ("replica",)
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    replica: Replica
    def __init__(self, replica: _Optional[_Union[Replica, _Mapping]] = ...) -> None: ...

class AnnounceResponse(_message.Message):
    __slots__ = ("drain",)
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    drain: bool
    def __init__(self, drain: _Optional[bool] = ...) -> None: ...

class WatchReplicasRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchReplicasResponse(_message.Message):
    __slots__ = ("replicas",)
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    replicas: _containers.RepeatedCompositeFieldContainer[Replica]
    def __init__(self, replicas: _Optional[_Iterable[_Union[Replica, _Mapping]]] = ...) -> None: ...

class ScaleReplicasRequest(_message.Message):
    __slots__ = ("num_targets", "num_drafts")
    NUM_TARGETS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    num_targets: int
    num_drafts: int
    def __init__(self, num_targets: _Optional[int] = ..., num_drafts: _Optional[int] = ...) -> None: ...

class ScaleReplicasResponse(_message.Message):
    __slots__ = ("num_targets", "num_drafts")
    NUM_TARGETS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    num_targets: int
    num_drafts: int
    def __init__(self, num_targets: _Optional[int] = ..., num_drafts: _Optional[int] = ...) -> None: ...
