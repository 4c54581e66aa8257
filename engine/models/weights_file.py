"""The converted weights on disk: a safetensors file whose header is known before its content."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from engine.models.dtype import TORCH_DTYPES
from engine.models.parameter import Parameter

_ALIGNMENT = 64
"""Bytes; the data starts on a cache line, so that vector loads of mapped weights rarely cross one."""

_SAFETENSORS_DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}


class WeightsFile:
    """`parameters` in `dtype` at `path`, one after the other."""

    def __init__(self, path: Path, parameters: Sequence[Parameter], dtype: str) -> None:
        self.path = path
        self._dtype = TORCH_DTYPES[dtype]
        self._spans: dict[str, tuple[int, tuple[int, ...]]] = {}
        offset, entries = 0, {}
        for parameter in parameters:
            end = offset + math.prod(parameter.shape) * self._dtype.itemsize
            entries[parameter.name] = {
                "dtype": _SAFETENSORS_DTYPES[dtype],
                "shape": parameter.shape,
                "data_offsets": (offset, end),
            }
            self._spans[parameter.name] = (offset, parameter.shape)
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
        """Writable views of every parameter; the file appears whole when the block ends well.

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
        data, width = whole[len(self._header) :], self._dtype.itemsize
        return {
            name: data[offset : offset + math.prod(shape) * width].view(self._dtype).view(shape)
            for name, (offset, shape) in self._spans.items()
        }


def _header(entries: Mapping[str, object]) -> bytes:
    """The length as uint64, then JSON, padded with blanks as the format allows."""
    text = json.dumps(entries, separators=(",", ":")).encode()
    padding = -(8 + len(text)) % _ALIGNMENT
    return struct.pack("<Q", len(text) + padding) + text + b" " * padding
