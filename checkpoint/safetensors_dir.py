"""The safetensors files of a Hugging Face directory: one file, or shards with an index.

A file is `header length u64 | JSON header | data`; the header gives each tensor's dtype, shape and
byte range in the data (https://github.com/huggingface/safetensors). Parsed here because it is tiny
and because the library hands out bf16 only through torch.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import orjson

from checkpoint.parameters import listing
from core.errors import ConfigError
from core.kv import DTYPE_NBYTES

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARDS = "model-*-of-*.safetensors"
_DTYPES = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}
_HEADER_LIMIT = 100 * 2**20


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in a shard: `begin` and `nbytes` are bytes in the file `shard`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: Path
    begin: int
    nbytes: int


class SafetensorsDir:
    """All tensors of a directory, checked both ways between index, headers and file sizes.

    Raises ConfigError, naming files and tensors, when something is missing, short, doubled or extra.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        index = _read_index(path)
        self.shards = sorted({path / name for name in index.values()} if index else {path / SINGLE})
        absent = [shard.name for shard in self.shards if not shard.is_file()]
        if absent:
            raise ConfigError(f"{path} lacks {listing(absent)}; get the model's files again")
        self._maps: dict[Path, mmap.mmap] = {}
        self.tensors: dict[str, StoredTensor] = {}
        for shard in self.shards:
            for tensor in self._read_header(shard):
                if tensor.name in self.tensors:
                    other = self.tensors[tensor.name].shard
                    raise ConfigError(
                        f"{path} holds {tensor.name} twice, in {other.name} and in {shard.name}; "
                        f"get the model's files again"
                    )
                self.tensors[tensor.name] = tensor
        if index:
            self._check_against(index)

    def tensor_bytes(self, tensor: StoredTensor) -> memoryview:
        """The tensor's bytes as stored (read-only, mapped, valid as long as the view lives)."""
        return memoryview(self._maps[tensor.shard])[tensor.begin : tensor.begin + tensor.nbytes]

    def _check_against(self, index: Mapping[str, str]) -> None:
        lost = [name for name, shard in index.items() if not self._is_in(name, shard)]
        if lost:
            raise ConfigError(
                f"{self.path / INDEX} promises tensors that their shards do not hold: {listing(lost)}; "
                f"get the model's files again"
            )
        unlisted = self.tensors.keys() - index.keys()
        if unlisted:
            raise ConfigError(
                f"shards in {self.path} hold tensors that {INDEX} does not list: {listing(unlisted)}; "
                f"get the model's files again"
            )

    def _is_in(self, name: str, shard: str) -> bool:
        return name in self.tensors and self.tensors[name].shard.name == shard

    def _read_header(self, shard: Path) -> list[StoredTensor]:
        mapped = self._maps[shard] = _map(shard)
        header_nbytes = int.from_bytes(mapped[:8], "little")
        data = 8 + header_nbytes
        if not 2 <= header_nbytes <= _HEADER_LIMIT or data > len(mapped):
            raise ConfigError(
                f"{shard} is not a safetensors file or is cut off in its header; get it again "
                f"(with git-lfs if it is a pointer file)"
            )
        try:
            header: dict[str, Any] = orjson.loads(mapped[8:data])
            header.pop("__metadata__", None)
            tensors = [_stored(shard, data, name, entry) for name, entry in header.items()]
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{shard} has a damaged header ({error!r}); get the file again") from None
        end = max((tensor.begin + tensor.nbytes for tensor in tensors), default=data)
        if end != len(mapped):
            raise ConfigError(
                f"{shard} has {len(mapped)} bytes, its header describes {end}; the file is "
                f"{'truncated' if end > len(mapped) else 'longer than it should be'}, get it again"
            )
        return tensors


def _stored(shard: Path, data: int, name: str, entry: Mapping[str, Any]) -> StoredTensor:
    if entry["dtype"] not in _DTYPES:
        raise ConfigError(
            f"{shard}: {name} has dtype {entry['dtype']}, supported are {', '.join(_DTYPES)}; "
            f"choose an unquantized checkpoint"
        )
    dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    nbytes = prod(shape) * DTYPE_NBYTES[dtype]
    if begin < 0 or end - begin != nbytes:
        raise ConfigError(
            f"{shard}: {name} has {end - begin} bytes, its shape needs {nbytes}; get the file again"
        )
    return StoredTensor(name, dtype, shape, shard, data + begin, nbytes)


def _read_index(path: Path) -> dict[str, str] | None:
    """tensor -> shard file name, or None where one file holds the model."""
    shards = {file.name for file in path.glob(_SHARDS)}
    if not (path / INDEX).is_file():
        if (path / SINGLE).is_file():
            return None
        if shards:
            raise ConfigError(f"{path} has shards but no {INDEX}; get that file too")
        raise ConfigError(
            f"{path} has neither {SINGLE} nor {INDEX}; give a directory with safetensors weights"
        )
    try:
        index: dict[str, str] = orjson.loads((path / INDEX).read_bytes())["weight_map"]
        named = {Path(name).name for name in index.values()}
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"cannot read {path / INDEX} ({error!r}); get the file again") from None
    if not index or named != set(index.values()):
        raise ConfigError(f"{path / INDEX} lists no tensors, or files outside its directory; get it again")
    if shards - named:
        raise ConfigError(
            f"{path} holds shards that {INDEX} does not name: {listing(shards - named)}; "
            f"remove what is not of this model, or get the index again"
        )
    return index


def _map(file: Path) -> mmap.mmap:
    try:
        with file.open("rb") as handle:
            return mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {error}; get the file again") from None
