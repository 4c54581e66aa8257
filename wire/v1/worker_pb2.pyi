from wire.v1 import kv_pb2 as _kv_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SetRoleRequest(_message.Message):
    __slots__ = ("role",)
    ROLE_FIELD_NUMBER: _ClassVar[int]
    role: str
    def __init__(self, role: _Optional[str] = ...) -> None: ...

class SetRoleReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchEvent(_message.Message):
    __slots__ = ("hello", "state", "kv")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    state: State
    kv: KvEvents
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., state: _Optional[_Union[State, _Mapping]] = ..., kv: _Optional[_Union[KvEvents, _Mapping]] = ...) -> None: ...

class KvEvents(_message.Message):
    __slots__ = ("first", "next", "snapshot", "tiers")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    first: int
    next: int
    snapshot: bool
    tiers: _containers.RepeatedCompositeFieldContainer[TierChanges]
    def __init__(self, first: _Optional[int] = ..., next: _Optional[int] = ..., snapshot: _Optional[bool] = ..., tiers: _Optional[_Iterable[_Union[TierChanges, _Mapping]]] = ...) -> None: ...

class TierChanges(_message.Message):
    __slots__ = ("tier", "stored", "evicted")
    TIER_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    tier: str
    stored: _containers.RepeatedScalarFieldContainer[int]
    evicted: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tier: _Optional[str] = ..., stored: _Optional[_Iterable[int]] = ..., evicted: _Optional[_Iterable[int]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("worker_id", "incarnation", "role", "fingerprint", "host", "pid", "address", "probe_address", "transports", "total_blocks", "dtype", "version", "max_num_seqs", "max_num_batched_tokens")
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
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
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
    max_num_seqs: int
    max_num_batched_tokens: int
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., role: _Optional[str] = ..., fingerprint: _Optional[_Union[_kv_pb2.Fingerprint, _Mapping]] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., address: _Optional[str] = ..., probe_address: _Optional[str] = ..., transports: _Optional[_Iterable[str]] = ..., total_blocks: _Optional[int] = ..., dtype: _Optional[str] = ..., version: _Optional[str] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ...) -> None: ...

class State(_message.Message):
    __slots__ = ("phase", "free_blocks", "cached_blocks", "running", "waiting", "loading", "held", "steps", "idle_s", "tiers", "prefill_model", "decode_model", "queued_tokens", "context_tokens", "links", "step_s", "taken")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MODEL_FIELD_NUMBER: _ClassVar[int]
    DECODE_MODEL_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    phase: str
    free_blocks: int
    cached_blocks: int
    running: int
    waiting: int
    loading: int
    held: int
    steps: int
    idle_s: float
    tiers: _containers.RepeatedCompositeFieldContainer[TierState]
    prefill_model: StepModel
    decode_model: StepModel
    queued_tokens: int
    context_tokens: int
    links: _containers.RepeatedCompositeFieldContainer[Link]
    step_s: float
    taken: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, phase: _Optional[str] = ..., free_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., loading: _Optional[int] = ..., held: _Optional[int] = ..., steps: _Optional[int] = ..., idle_s: _Optional[float] = ..., tiers: _Optional[_Iterable[_Union[TierState, _Mapping]]] = ..., prefill_model: _Optional[_Union[StepModel, _Mapping]] = ..., decode_model: _Optional[_Union[StepModel, _Mapping]] = ..., queued_tokens: _Optional[int] = ..., context_tokens: _Optional[int] = ..., links: _Optional[_Iterable[_Union[Link, _Mapping]]] = ..., step_s: _Optional[float] = ..., taken: _Optional[_Iterable[str]] = ...) -> None: ...

class StepModel(_message.Message):
    __slots__ = ("a", "b", "c", "num_steps")
    A_FIELD_NUMBER: _ClassVar[int]
    B_FIELD_NUMBER: _ClassVar[int]
    C_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    a: float
    b: float
    c: float
    num_steps: int
    def __init__(self, a: _Optional[float] = ..., b: _Optional[float] = ..., c: _Optional[float] = ..., num_steps: _Optional[int] = ...) -> None: ...

class Link(_message.Message):
    __slots__ = ("peer", "nbytes_per_s")
    PEER_FIELD_NUMBER: _ClassVar[int]
    NBYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    peer: str
    nbytes_per_s: float
    def __init__(self, peer: _Optional[str] = ..., nbytes_per_s: _Optional[float] = ...) -> None: ...

class TierState(_message.Message):
    __slots__ = ("tier", "token_s", "used_bytes", "capacity_bytes", "blocks", "hit_blocks", "breaker")
    TIER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BREAKER_FIELD_NUMBER: _ClassVar[int]
    tier: str
    token_s: float
    used_bytes: int
    capacity_bytes: int
    blocks: int
    hit_blocks: int
    breaker: str
    def __init__(self, tier: _Optional[str] = ..., token_s: _Optional[float] = ..., used_bytes: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., blocks: _Optional[int] = ..., hit_blocks: _Optional[int] = ..., breaker: _Optional[str] = ...) -> None: ...
