from wire.v1 import kv_pb2 as _kv_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WatchRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchEvent(_message.Message):
    __slots__ = ("hello", "state")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    state: State
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., state: _Optional[_Union[State, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("worker_id", "incarnation", "role", "fingerprint", "host", "pid", "address", "probe_address", "transports", "total_blocks", "dtype", "version")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PROBE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    role: str
    fingerprint: _kv_pb2.Fingerprint
    host: str
    pid: int
    address: str
    probe_address: str
    transports: _containers.RepeatedScalarFieldContainer[str]
    total_blocks: int
    dtype: str
    version: str
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., role: _Optional[str] = ..., fingerprint: _Optional[_Union[_kv_pb2.Fingerprint, _Mapping]] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., address: _Optional[str] = ..., probe_address: _Optional[str] = ..., transports: _Optional[_Iterable[str]] = ..., total_blocks: _Optional[int] = ..., dtype: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class State(_message.Message):
    __slots__ = ("phase", "free_blocks", "cached_blocks", "running", "waiting", "loading", "held", "steps", "idle_s")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    phase: str
    free_blocks: int
    cached_blocks: int
    running: int
    waiting: int
    loading: int
    held: int
    steps: int
    idle_s: float
    def __init__(self, phase: _Optional[str] = ..., free_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., loading: _Optional[int] = ..., held: _Optional[int] = ..., steps: _Optional[int] = ..., idle_s: _Optional[float] = ...) -> None: ...
