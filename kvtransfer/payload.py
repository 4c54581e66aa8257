"""The header that every stored block carries, the same for every tier below the host's.

    byte  0 magic "BATONBLK"        8
          8 format version          u32 little-endian, as all numbers
         12 zero                    4
         16 namespace digest        32   model, tokenizer, KV dtype, block size, layout (core/kv.py)
         48 block hash              32   the chain hash: all tokens up to this block, and the salt
         80 payload bytes           u64
         88 xxh3-64 of the payload  u64
         96 zero                    24
        120 xxh3-64 of bytes 0..119 u64

A tier stores header and payload as one object, so half an object is seen as such. The header is small
for Redis; the disk tier pads it to its own alignment. Whatever does not match is a miss: the object is
deleted and counted, never served.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from kvtransfer.checksum import checksum

MAGIC = b"BATONBLK"
FORMAT_VERSION = 1
_BODY = struct.Struct("<8sI4x32s32sQQ24x")
_CHECK = struct.Struct("<Q")
HEADER_NBYTES = _BODY.size + _CHECK.size
"""128."""

Buffer = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Header:
    """What an intact header says about the object that it stands before."""

    namespace: bytes
    block_hash: bytes
    payload_nbytes: int
    payload_checksum: int


def encode_header(namespace: bytes, block_hash: bytes, payload: Buffer) -> bytes:
    """`HEADER_NBYTES` bytes. `namespace` and `block_hash` have 32 bytes, `payload` is contiguous."""
    if len(namespace) != 32 or len(block_hash) != 32:
        raise ValueError(f"digests of 32 bytes expected, got {len(namespace)} and {len(block_hash)}")
    body = _BODY.pack(MAGIC, FORMAT_VERSION, namespace, block_hash, len(payload), checksum(payload))
    return body + _CHECK.pack(checksum(body))


def read_header(header: Buffer) -> Header | None:
    """What an intact header of this format says; None for anything else. Bytes behind it are ignored."""
    return None if _damage(header) else _fields(header)


def check(header: Buffer, namespace: bytes, block_hash: bytes, payload: Buffer) -> str | None:
    """None when these are the bytes of that block, else the first thing that does not match:
    `magic`, `version`, `header`, `namespace`, `block_hash`, `length` or `checksum`.

    Reads the whole payload (xxh3, 12-28 GB/s).
    """
    if damage := _damage(header):
        return damage
    said = _fields(header)
    if said.namespace != namespace:
        return "namespace"
    if said.block_hash != block_hash:
        return "block_hash"
    if said.payload_nbytes != len(payload):
        return "length"
    return None if said.payload_checksum == checksum(payload) else "checksum"


def check_named(header: Buffer, namespace_prefix: bytes, block_hash: bytes, payload: Buffer) -> str | None:
    """As `check`, for whoever knows the namespace only by its first bytes, as names of files and keys do."""
    said = read_header(header)
    if said is not None and not said.namespace.startswith(namespace_prefix):
        return "namespace"
    return check(header, said.namespace if said else b"", block_hash, payload)


def _damage(header: Buffer) -> str | None:
    """Why this is not an intact header of this format. The version stands before what it governs."""
    if len(header) < HEADER_NBYTES or header[:8] != MAGIC:
        return "magic"
    if int.from_bytes(header[8:12], "little") != FORMAT_VERSION:
        return "version"
    (expected,) = _CHECK.unpack_from(header, _BODY.size)
    return None if checksum(header[: _BODY.size]) == expected else "header"


def _fields(header: Buffer) -> Header:
    _, _, namespace, block_hash, nbytes, payload_checksum = _BODY.unpack_from(header)
    return Header(namespace, block_hash, nbytes, payload_checksum)
