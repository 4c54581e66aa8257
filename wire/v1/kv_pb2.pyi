from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Fingerprint(_message.Message):
    __slots__ = ("model_digest", "tokenizer_digest", "num_layers", "num_kv_heads", "head_dim", "block_size", "kv_dtype", "rope", "max_model_len", "layout_version", "protocol_version")
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    ROPE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    model_digest: str
    tokenizer_digest: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    kv_dtype: str
    rope: str
    max_model_len: int
    layout_version: int
    protocol_version: int
    def __init__(self, model_digest: _Optional[str] = ..., tokenizer_digest: _Optional[str] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., block_size: _Optional[int] = ..., kv_dtype: _Optional[str] = ..., rope: _Optional[str] = ..., max_model_len: _Optional[int] = ..., layout_version: _Optional[int] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class TransportOffer(_message.Message):
    __slots__ = ("name", "bodies")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BODIES_FIELD_NUMBER: _ClassVar[int]
    name: str
    bodies: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, name: _Optional[str] = ..., bodies: _Optional[_Iterable[bytes]] = ...) -> None: ...
