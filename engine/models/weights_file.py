"""The converted weights on disk: a safetensors file whose header is known before its content."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

_ALIGNMENT = 64
"""Bytes; the data starts on a cache line, so that vector loads of mapped weights rarely cross one."""

_SAFETENSORS_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of the file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class WeightsFile:
    """`tensors` at `path`, one after the other."""

    def __init__(self, path: Path, tensors: Sequence[StoredTensor]) -> None:
        self.path = path
        self._spans: list[tuple[int, StoredTensor]] = []
        offset, entries = 0, {}
        for tensor in tensors:
            end = offset + tensor.nbytes
            entries[tensor.name] = {
                "dtype": _SAFETENSORS_DTYPES[tensor.dtype],
                "shape": tensor.shape,
                "data_offsets": (offset, end),
            }
            self._spans.append((offset, tensor))
            offset = end
        self._header = _header(entries)
        self.nbytes = len(self._header) + offset

    def is_intact(self) -> bool:
        """Whether the file is there with exactly the header and size it should have."""
        try:
            with self.path.open("rb") as file:
                found = file.read(len(self._header))
                return found == self._header and os.fstat(file.fileno()).st_size == self.nbytes
        except OSError:
            return False

    @contextmanager
    def rewrite(self) -> Iterator[Mapping[str, torch.Tensor]]:
        """Writable views of every tensor; the file appears whole when the block ends well.

        Call under the lock of `path`: remains of earlier tries are removed. Raises OSError; space is
        reserved first, since a full disk under a mapping would kill the process.
        """
        for stale in self.path.parent.glob(f"{self.path.name}.*.tmp"):
            stale.unlink(missing_ok=True)
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, self.nbytes)
                file.write(self._header)
                file.flush()
                yield self._views(temporary)
                os.fsync(file.fileno())
            temporary.replace(self.path)
        finally:
            temporary.unlink(missing_ok=True)

    def _views(self, path: Path) -> Mapping[str, torch.Tensor]:
        whole = torch.from_file(str(path), shared=True, size=self.nbytes, dtype=torch.uint8)
        data = whole[len(self._header) :]
        return {
            tensor.name: data[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for offset, tensor in self._spans
        }


def _header(entries: Mapping[str, object]) -> bytes:
    """The length as uint64, then JSON, padded with blanks as the format allows."""
    text = json.dumps(entries, separators=(",", ":")).encode()
    padding = -(8 + len(text)) % _ALIGNMENT
    return struct.pack("<Q", len(text) + padding) + text + b" " * padding
