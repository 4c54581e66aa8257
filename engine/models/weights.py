"""A model's tensors: converted once per number format into one file, then mapped by every worker of a host.

checkpoint tensors --convert (one process, under a lock)--> <digest>-<dtype>[-int8]-v<format>.safetensors
                                                                | mapped, pages shared
                                                   worker   worker   worker
"""

from __future__ import annotations

import errno
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open

from checkpoint.checkpoint import Checkpoint, RawTensor
from core import log
from core.errors import ConfigError
from engine.kernels.int8 import Weight
from engine.models.dtype import TORCH_DTYPES
from engine.models.parameter import Parameter
from engine.models.registry import model_class
from engine.models.storage import Storage, storage_of
from engine.models.weights_file import WeightsFile

FORMAT = 1
"""Version of names, fusing and packing; a file of another version is never looked at."""

LOCK_POLL_S = 1.0

Progress = Callable[[float], None]
"""Told the share done, 0.0 .. 1.0; also a sign of life while another process converts."""

_log = log.get("weights")


def load_weights(
    checkpoint: Checkpoint,
    dtype: str,
    cache_dir: str | os.PathLike[str],
    progress: Progress = lambda _: None,
    wait_s: float = 300.0,
    quantization: str = "none",
) -> dict[str, Weight]:
    """The model's `parameters` in `dtype`, backed by a shared read-only mapping.

    Under `quantization` int8 its matrices are QuantizedWeight. The first call for a model and number
    format writes the file below `cache_dir`; a damaged one is written anew. Waits at most `wait_s` seconds
    for another process that is converting. Raises ConfigError when the checkpoint is not what the model
    needs or cannot be quantized, the disk is full, or the wait is over.
    """
    model = model_class(checkpoint.config.architecture)
    folder = Path(cache_dir).expanduser()
    number_format = dtype if quantization == "none" else f"{dtype}-{quantization}"
    stem = f"{checkpoint.weights_digest()[:32]}-{number_format}-v{FORMAT}"
    parameters = model.parameters(checkpoint.config)
    storages = {parameter.name: storage_of(parameter, dtype, quantization) for parameter in parameters}
    stored = [tensor for storage in storages.values() for tensor in storage.layout()]
    file = WeightsFile(folder / f"{stem}.safetensors", stored)
    if not file.is_intact():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with _locked(folder / f"{stem}.lock", progress, wait_s):
                if not file.is_intact():
                    _convert(checkpoint, file, storages, _places(parameters), progress)
        except OSError as error:
            raise _unwritable(folder, file.nbytes, error) from error
    progress(1.0)
    tensors = _map(file.path)
    return {name: storage.read(tensors) for name, storage in storages.items()}


_Place = tuple[str, int]
"""Parameter name and first row there."""


def on_device(weights: Mapping[str, Weight], device: torch.device) -> dict[str, Weight]:
    """Copies on a GPU, which has no kernels for int8 weights: those were refused."""
    return {name: cast(torch.Tensor, weight).to(device) for name, weight in weights.items()}


def _places(parameters: Iterable[Parameter]) -> dict[str, _Place]:
    """Where each checkpoint tensor goes."""
    places: dict[str, _Place] = {}
    for parameter in parameters:
        first_row = 0
        for source, num_rows in zip(parameter.sources, parameter.source_rows, strict=True):
            places[source] = (parameter.name, first_row)
            first_row += num_rows
    return places


def _convert(
    checkpoint: Checkpoint,
    file: WeightsFile,
    storages: dict[str, Storage],
    places: dict[str, _Place],
    progress: Progress,
) -> None:
    began, total = time.monotonic(), len(places)
    with file.rewrite() as views:
        for raw in checkpoint.tensors():
            name, first_row = _take(places, raw)
            storages[name].write(_as_tensor(raw), first_row, views)
            progress(1.0 - len(places) / total)
        if places:
            raise ConfigError(f"the model's files lack {next(iter(places))}; get the model's files again")
    _log.info(
        "weights.converted",
        file=str(file.path),
        nbytes=file.nbytes,
        seconds=round(time.monotonic() - began, 1),
    )


def _take(places: dict[str, _Place], raw: RawTensor) -> _Place:
    place = places.pop(raw.name, None)
    if place is None:
        raise ConfigError(
            f"the model's files hold {raw.name} twice or where no place is for it; choose another checkpoint"
        )
    return place


def _as_tensor(raw: RawTensor) -> torch.Tensor:
    with warnings.catch_warnings():
        # The buffer may be a read-only mapping; we only read it, which is all torch warns about.
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        flat = torch.frombuffer(raw.data, dtype=TORCH_DTYPES[raw.dtype])
    return flat.view(raw.shape)


def _map(path: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot read the converted weights {path}: {error}; delete the file") from error


@contextmanager
def _locked(path: Path, progress: Progress, wait_s: float) -> Iterator[None]:
    """Hold the lock; while another process holds it, `progress(0.0)` about every second."""
    lock, deadline = FileLock(path), time.monotonic() + wait_s
    while not lock.is_locked:
        try:
            lock.acquire(timeout=min(LOCK_POLL_S, max(0.0, deadline - time.monotonic())))
        except Timeout:
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"another process has been converting the model for {wait_s:.0f} s (lock {path}); "
                    f"wait for it or end it, then start again"
                ) from None
            progress(0.0)
    try:
        yield
    finally:
        lock.release()


def _unwritable(folder: Path, nbytes: int, error: OSError) -> ConfigError:
    need = f"the converted weights take {nbytes / 1e6:.0f} MB"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ConfigError(f"no space left for {folder}: {need}; free some or set cache_dir elsewhere")
    return ConfigError(
        f"cannot write {folder}: {error.strerror}; set cache_dir to a writable folder ({need})"
    )
