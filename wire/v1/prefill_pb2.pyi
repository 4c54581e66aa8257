from wire.v1 import kv_pb2 as _kv_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ConnectRequest(_message.Message):
    __slots__ = ("fingerprint",)
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    fingerprint: _kv_pb2.Fingerprint
    def __init__(self, fingerprint: _Optional[_Union[_kv_pb2.Fingerprint, _Mapping]] = ...) -> None: ...

class ConnectReply(_message.Message):
    __slots__ = ("incarnation", "fingerprint", "offers")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    fingerprint: _kv_pb2.Fingerprint
    offers: _containers.RepeatedCompositeFieldContainer[_kv_pb2.TransportOffer]
    def __init__(self, incarnation: _Optional[str] = ..., fingerprint: _Optional[_Union[_kv_pb2.Fingerprint, _Mapping]] = ..., offers: _Optional[_Iterable[_Union[_kv_pb2.TransportOffer, _Mapping]]] = ...) -> None: ...

class RunRequest(_message.Message):
    __slots__ = ("transfer_id", "epoch", "incarnation", "token_ids", "cache_salt", "first_block", "request_id")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    epoch: int
    incarnation: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    cache_salt: str
    first_block: int
    request_id: str
    def __init__(self, transfer_id: _Optional[str] = ..., epoch: _Optional[int] = ..., incarnation: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., cache_salt: _Optional[str] = ..., first_block: _Optional[int] = ..., request_id: _Optional[str] = ...) -> None: ...

class RunEvent(_message.Message):
    __slots__ = ("accepted", "ready")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    accepted: Accepted
    ready: BlocksReady
    def __init__(self, accepted: _Optional[_Union[Accepted, _Mapping]] = ..., ready: _Optional[_Union[BlocksReady, _Mapping]] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("lease_s",)
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    lease_s: float
    def __init__(self, lease_s: _Optional[float] = ...) -> None: ...

class BlocksReady(_message.Message):
    __slots__ = ("first", "block_ids", "checksums", "age_s", "queue_s", "cached")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    first: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    checksums: _containers.RepeatedScalarFieldContainer[int]
    age_s: float
    queue_s: float
    cached: bool
    def __init__(self, first: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., checksums: _Optional[_Iterable[int]] = ..., age_s: _Optional[float] = ..., queue_s: _Optional[float] = ..., cached: _Optional[bool] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("transfer_id", "epoch")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    epoch: int
    def __init__(self, transfer_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class RenewReply(_message.Message):
    __slots__ = ("lease_s",)
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    lease_s: float
    def __init__(self, lease_s: _Optional[float] = ...) -> None: ...
