"""KV geometry, its bytes, and the fingerprint that two workers must share to exchange blocks."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from blake3 import blake3

from core.errors import ConfigError

LAYOUT_VERSION = 1
"""Version of the order of numbers inside a block: [layer, kv head, k|v, token, head dim]."""

PROTOCOL_VERSION = 1
"""Version of the gRPC contract between workers."""

DTYPE_NBYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
BLOCK_SIZES = (8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Geometry of one worker's pool `[num_blocks, num_layers, num_kv_heads, 2, block_size, head_dim]`.

    One block is one contiguous run of `block_nbytes` bytes: one descriptor to transfer, one object
    for every tier.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    kv_dtype: str

    def __post_init__(self) -> None:
        if self.block_size not in BLOCK_SIZES:
            raise ConfigError(f"block_size {self.block_size} is not supported; choose one of {BLOCK_SIZES}")
        if self.kv_dtype not in DTYPE_NBYTES:
            raise ConfigError(
                f"KV dtype {self.kv_dtype!r} is not known; choose one of {sorted(DTYPE_NBYTES)}"
            )

    @property
    def bytes_per_token(self) -> int:
        """2 * layers * kv_heads * head_dim * bytes(kv_dtype)."""
        numbers = 2 * self.num_layers * self.num_kv_heads * self.head_dim
        return numbers * DTYPE_NBYTES[self.kv_dtype]

    @property
    def block_nbytes(self) -> int:
        return self.block_size * self.bytes_per_token

    def num_blocks_in(self, nbytes: int) -> int:
        """Blocks that fit in `nbytes` bytes: floor(nbytes / block_nbytes)."""
        return nbytes // self.block_nbytes


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What two workers must have in common before one may read the other's blocks.

    The geometry is that of the whole model: how many tensor-parallel ranks it is split over may differ.
    Digests are hex. `namespace` covers the fields that decide the KV bytes themselves, so it is
    also the root of block identity; the rest decides whether a pair can work together.
    """

    model_digest: str
    tokenizer_digest: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    kv_dtype: str
    rope: str
    max_model_len: int
    layout_version: int = LAYOUT_VERSION
    protocol_version: int = PROTOCOL_VERSION

    @property
    def namespace(self) -> bytes:
        """32 bytes: model, tokenizer, kv dtype, block size and layout version."""
        parts = (
            self.model_digest,
            self.tokenizer_digest,
            self.kv_dtype,
            str(self.block_size),
            str(self.layout_version),
        )
        return blake3("\x1f".join(parts).encode()).digest()

    def difference(self, other: Fingerprint) -> tuple[str, object, object] | None:
        """The first differing field as (name, ours, theirs), or None when the pair may work."""
        for field in fields(self):
            ours, theirs = getattr(self, field.name), getattr(other, field.name)
            if ours != theirs:
                return field.name, ours, theirs
        return None

    def as_dict(self) -> dict[str, object]:
        return asdict(self)
