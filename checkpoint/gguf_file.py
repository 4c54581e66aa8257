"""GGUF container: metadata and tensor table, read with `struct` over a memory map.

    "GGUF" | version u32 | #tensors u64 | #metadata u64
    metadata: key string | value type u32 | value
    tensors:  name string | #dims u32 | dims u64[] (fastest first) | ggml type u32 | offset u64
    padding to `general.alignment` | tensor data

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` package has a reader
too, but it builds numpy views of every string: two seconds for a vocabulary of 49k tokens.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from core.errors import ConfigError

VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")

GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
}
"""ggml type -> (name, numbers per block, bytes per block), for the types that can be dequantized."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: `shape` is row-major (slowest first), `offset` and `nbytes` are bytes in the file."""

    name: str
    ggml_type: int
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class GGUFFile:
    """An open GGUF file. Raises ConfigError when it is no GGUF file, damaged or shorter than it says."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read {path}: {error}; check the path and the file") from None
        reader = _Reader(self._map, path)
        num_tensors, num_metadata = reader.header()
        self.metadata: dict[str, Any] = {}
        for _ in range(num_metadata):
            key = reader.string()
            self.metadata[key] = reader.value(reader.u32())
        entries = [reader.tensor_entry() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ConfigError(
                f"{path} has alignment {alignment!r}, a positive number is needed; get it again"
            )
        start = -(-reader.position // alignment) * alignment
        self.tensors = [self._locate(start, *entry) for entry in entries]

    def _locate(
        self, start: int, name: str, dims: tuple[int, ...], ggml_type: int, offset: int
    ) -> TensorInfo:
        if ggml_type not in GGML_TYPES:
            known = ", ".join(type_name for type_name, _, _ in GGML_TYPES.values())
            raise ConfigError(
                f"{self.path}: {name} has ggml type {_type_name(ggml_type)}, which cannot be read; "
                f"choose a file with {known}"
            )
        type_name, block_numbers, block_nbytes = GGML_TYPES[ggml_type]
        if dims and dims[0] % block_numbers:
            raise ConfigError(
                f"{self.path}: rows of {name} hold {dims[0]} numbers, {type_name} comes in blocks of "
                f"{block_numbers}; the file is damaged, get it again"
            )
        nbytes = prod(dims) // block_numbers * block_nbytes
        if start + offset + nbytes > len(self._map):
            raise ConfigError(
                f"{self.path} is truncated: {name} ends at byte {start + offset + nbytes}, "
                f"the file has {len(self._map)}; get it again"
            )
        return TensorInfo(name, ggml_type, dims[::-1], start + offset, nbytes)

    def tensor_bytes(self, tensor: TensorInfo) -> memoryview:
        """The tensor's bytes as stored (read-only, mapped, valid as long as the view lives)."""
        return memoryview(self._map)[tensor.offset : tensor.offset + tensor.nbytes]


def _type_name(ggml_type: int) -> str:
    from gguf import GGMLQuantizationType  # here, not above: only for this message

    names = {kind.value: kind.name for kind in GGMLQuantizationType}
    return f"{ggml_type} ({names.get(ggml_type, 'unknown')})"


class _Reader:
    """A cursor over the header part; every read is checked against the end of the file."""

    def __init__(self, buffer: mmap.mmap, path: Path) -> None:
        self._buffer, self._path = buffer, path
        self.position = 0

    def header(self) -> tuple[int, int]:
        """(number of tensors, number of metadata pairs), after checking magic and version."""
        if self._buffer[:4] != b"GGUF":
            raise ConfigError(
                f"{self._path} is not a GGUF file (it begins with {self._buffer[:4]!r}); "
                f"check the path, or fetch the file itself if this is a git-lfs pointer"
            )
        self.position = 4
        version = self.u32()
        if version not in VERSIONS:
            raise ConfigError(
                f"{self._path} has GGUF version {version}, supported are {VERSIONS} in little-endian; "
                f"convert the model again"
            )
        return self.u64(), self.u64()

    def _take(self, nbytes: int) -> int:
        """Move on by `nbytes`; returns where they began."""
        begin = self.position
        if nbytes > len(self._buffer) - begin:
            raise ConfigError(
                f"{self._path} is truncated: its header ends at byte {begin}; get the file again"
            )
        self.position = begin + nbytes
        return begin

    def u32(self) -> int:
        return _U32.unpack_from(self._buffer, self._take(4))[0]

    def u64(self) -> int:
        return _U64.unpack_from(self._buffer, self._take(8))[0]

    def string(self) -> str:
        begin = self._take(self.u64())
        try:
            return self._buffer[begin : self.position].decode()
        except UnicodeDecodeError:
            raise ConfigError(
                f"{self._path} has a string that is not UTF-8 at byte {begin}; get the file again"
            ) from None

    def value(self, kind: int) -> Any:
        """A metadata value: number, bool, string, or list of one kind."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item_kind, count = self.u32(), self.u64()
            if item_kind in _SCALARS:
                return list(self._scalars(item_kind, count))
            self._check_count(count)
            return [self.value(item_kind) for _ in range(count)]
        if kind not in _SCALARS:
            raise ConfigError(f"{self._path} has metadata of unknown type {kind}; convert the model again")
        return self._scalars(kind, 1)[0]

    def _check_count(self, count: int) -> None:
        # Strings and arrays take 8 bytes each at least: a damaged count fails at once, not after hours.
        if count > (len(self._buffer) - self.position) // 8:
            raise ConfigError(f"{self._path} is truncated or damaged at byte {self.position}; get it again")

    def _scalars(self, kind: int, count: int) -> tuple[Any, ...]:
        size = struct.calcsize("<" + _SCALARS[kind])
        return struct.unpack_from(f"<{count}{_SCALARS[kind]}", self._buffer, self._take(count * size))

    def tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """(name, dims with the fastest first, ggml type, offset into the data part)."""
        name, num_dims = self.string(), self.u32()
        dims = self._scalars(10, num_dims)
        return name, dims, self.u32(), self.u64()
