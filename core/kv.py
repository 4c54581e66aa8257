"""KV geometry, its bytes, and the fingerprint that two workers must share to exchange blocks."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields
from itertools import groupby

from blake3 import blake3

from core.errors import ConfigError

LAYOUT_VERSION = 1
"""Version of the order of numbers inside a block: [layer, kv head, k|v, token, head dim], see KVLayout."""

PROTOCOL_VERSION = 1
"""Version of the gRPC contract between workers."""

DTYPE_NBYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""Numbers that stand for themselves: bytes of one."""

SCALED_BITS = {"int8": 8, "int4": 4}
"""Integers that stand for themselves times a scale: bits of one."""

SCALES_NBYTES = {"int8": 2, "int4": 3}
"""Bytes a token of one head has beside them: a bf16 scale; int4 has also the integer that means zero."""

KV_FORMATS = {name: (name, name) for name in (*DTYPE_NBYTES, "int8")} | {"k8v4": ("int8", "int4")}
"""KV dtypes: the format of keys and that of values."""

SKIPPED_DTYPE = "bf16"
"""What a quantized pool holds in the layers it is told to skip."""

BLOCK_SIZES = (8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class Band:
    """Neighbouring layers of a block whose heads are stored alike.

    `offset`: bytes of the block before them; `head_nbytes`: of one head of one layer, its keys and values.
    """

    offset: int
    num_layers: int
    head_nbytes: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Geometry of one worker's pool. One block is one contiguous run of `block_nbytes` bytes: one descriptor
    to transfer, one object for every tier.

        block   layers, one after the other
        layer   KV heads
        head    run of keys, run of values
        run     numbers [block_size, head_dim]; of scaled formats then block_size scales, then of int4
                block_size zeros

    Layers in `skip_layers` hold SKIPPED_DTYPE instead of `kv_dtype`. Raises ConfigError for what cannot be.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    kv_dtype: str
    skip_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.block_size not in BLOCK_SIZES:
            raise ConfigError(f"block_size {self.block_size} is not supported; choose one of {BLOCK_SIZES}")
        if self.kv_dtype not in KV_FORMATS:
            raise ConfigError(f"KV dtype {self.kv_dtype!r} is not known; choose one of {sorted(KV_FORMATS)}")
        if self.skip_layers and self.kv_dtype in ("fp32", "bf16", "fp16"):
            raise ConfigError(
                f"--kv-quant-skip-layers names layers to leave unquantized, but KV dtype {self.kv_dtype} "
                "quantizes none; leave it out, or choose --kv-cache-dtype int8, k8v4 or an fp8 one"
            )
        if self.kv_dtype == "k8v4" and self.head_dim % 16:
            raise ConfigError(
                f"KV dtype k8v4 needs a head_dim that is a multiple of 16, this model has {self.head_dim}; "
                "use int8"
            )

    @property
    def identity(self) -> str:
        """`kv_dtype` and the skipped layers, as int8/skip=0,29: blocks of two identities never mix."""
        skipped = ",".join(map(str, self.skip_layers))
        return f"{self.kv_dtype}/skip={skipped}" if skipped else self.kv_dtype

    def formats(self, layer: int) -> tuple[str, str]:
        """The formats of a layer's keys and of its values."""
        return KV_FORMATS[SKIPPED_DTYPE if layer in self.skip_layers else self.kv_dtype]

    def numbers_nbytes(self, number_format: str) -> int:
        """Bytes of the numbers of one run: block_size * head_dim * bits / 8."""
        bits = SCALED_BITS.get(number_format) or 8 * DTYPE_NBYTES[number_format]
        return self.block_size * self.head_dim * bits // 8

    def run_nbytes(self, number_format: str) -> int:
        """Bytes of a block's keys, or values, of one head of one layer."""
        return self.numbers_nbytes(number_format) + self.block_size * SCALES_NBYTES.get(number_format, 0)

    def head_nbytes(self, layer: int) -> int:
        """Bytes of one head of one layer in a block: its run of keys and its run of values."""
        return sum(map(self.run_nbytes, self.formats(layer)))

    @property
    def bands(self) -> tuple[Band, ...]:
        """All layers in order; one band where nothing is skipped."""
        bands, offset = [], 0
        for head_nbytes, layers in groupby(map(self.head_nbytes, range(self.num_layers))):
            count = len(list(layers))
            bands.append(Band(offset, count, head_nbytes))
            offset += count * self.num_kv_heads * head_nbytes
        return tuple(bands)

    @property
    def block_nbytes(self) -> int:
        """kv_heads * the sum of all layers' `head_nbytes`."""
        return self.num_kv_heads * sum(map(self.head_nbytes, range(self.num_layers)))

    @property
    def bytes_per_token(self) -> int:
        """block_nbytes / block_size, scales included; for plain dtypes 2 * layers * kv_heads * head_dim *
        bytes of a number."""
        return self.block_nbytes // self.block_size


def parse_layers(text: str, num_layers: int) -> tuple[int, ...]:
    """Layers as `0,27-29`, sorted. Raises ConfigError for what is not such a list of the model's layers."""
    layers: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if not found:
            raise ConfigError(f"layers {text!r}: {part!r} is neither a layer nor a range such as 0-1")
        picked = range(int(found[1]), int(found[2] or found[1]) + 1)
        if not picked or picked[-1] >= num_layers:
            raise ConfigError(f"layers {text!r}: {part!r} is not within 0 to {num_layers - 1}")
        layers.update(picked)
    return tuple(sorted(layers))


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
