"""A model's tensors: converted once per dtype into one file, then mapped by every worker of a host.

    checkpoint tensors --convert (one process, under a lock)--> <digest>-<dtype>-v<format>.safetensors
                                                                    | mapped, pages shared
                                                       worker   worker   worker
"""

from __future__ import annotations

import errno
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open

from checkpoint.config import ModelConfig
from core import log
from core.errors import ConfigError
from engine.models.dtype import TORCH_DTYPES
from engine.models.parameter import Parameter
from engine.models.registry import model_class
from engine.models.weights_file import WeightsFile

FORMAT = 1
"""Version of names and fusing; a file of another version is never looked at."""

LOCK_POLL_S = 1.0

Progress = Callable[[float], None]
"""Told the share done, 0.0 .. 1.0; also a sign of life while another process converts."""

_log = log.get("weights")


class RawTensor(Protocol):
    """One tensor of a checkpoint; see `checkpoint`. `data` is row-major, little-endian."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def data(self) -> object: ...


class Checkpoint(Protocol):
    """What is needed of `checkpoint.open.Checkpoint`."""

    config: ModelConfig

    def weights_digest(self) -> str: ...

    def tensors(self) -> Iterator[RawTensor]: ...


def load_weights(
    checkpoint: Checkpoint,
    dtype: str,
    cache_dir: str | os.PathLike[str],
    progress: Progress = lambda _: None,
    wait_s: float = 300.0,
) -> dict[str, torch.Tensor]:
    """The tensors of the model's `parameters` in `dtype`, backed by a shared read-only mapping.

    The first call for a model and dtype writes the file below `cache_dir`; a damaged one is written
    anew. Waits at most `wait_s` seconds for another process that is converting. Raises ConfigError
    when the checkpoint lacks, repeats or does not fit a tensor, when the disk is full, or when the
    wait is over.
    """
    model = model_class(checkpoint.config.architecture)
    folder = Path(cache_dir).expanduser()
    stem = f"{checkpoint.weights_digest()[:32]}-{dtype}-v{FORMAT}"
    parameters = model.parameters(checkpoint.config)
    file = WeightsFile(folder / f"{stem}.safetensors", parameters, dtype)
    if not file.is_intact():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with _locked(folder / f"{stem}.lock", progress, wait_s):
                if not file.is_intact():
                    tensors = _wanted(checkpoint, parameters, model.ignores)
                    _convert(file, tensors, progress)
        except OSError as error:
            raise _unwritable(folder, file.nbytes, error) from error
    progress(1.0)
    return _map(file.path)


def _convert(file: WeightsFile, tensors: Iterable[tuple[RawTensor, Parameter, int]], progress: Progress) -> None:
    began = time.monotonic()
    with file.rewrite() as views:
        done, total = 0, sum(view.numel() for view in views.values())
        for raw, parameter, first_row in tensors:
            source = _as_tensor(raw)
            views[parameter.name][first_row : first_row + source.shape[0]] = source
            done += source.numel()
            progress(done / total)
    _log.info(
        "weights.converted",
        file=str(file.path),
        nbytes=file.nbytes,
        seconds=round(time.monotonic() - began, 1),
    )


def _wanted(
    checkpoint: Checkpoint,
    parameters: Iterable[Parameter],
    ignores: Callable[[str, ModelConfig], bool],
) -> Iterator[tuple[RawTensor, Parameter, int]]:
    """Each checkpoint tensor with the parameter it belongs to and its first row there.

    Raises ConfigError unless every source of every parameter comes exactly once, in its shape, and
    nothing else comes that the model would have needed.
    """
    config, missing = checkpoint.config, _places(parameters)
    known = set(missing)
    for raw in checkpoint.tensors():
        if raw.name not in missing:
            if raw.name in known:
                raise ConfigError(f"the model's files hold tensor {raw.name} twice; get them anew")
            if ignores(raw.name, config):
                continue
            raise ConfigError(
                f"tensor {raw.name} has no place in {config.architecture}; "
                f"this variant of the architecture is not supported"
            )
        parameter, first_row, shape = missing.pop(raw.name)
        if tuple(raw.shape) != shape:
            raise ConfigError(
                f"tensor {raw.name} has shape {tuple(raw.shape)}, the model's config says {shape}; "
                f"config and weights do not belong together"
            )
        yield raw, parameter, first_row
    if missing:
        some = ", ".join(list(missing)[:3])
        raise ConfigError(f"{len(missing)} tensors are missing from the model's files: {some}; get them anew")


def _places(parameters: Iterable[Parameter]) -> dict[str, tuple[Parameter, int, tuple[int, ...]]]:
    places = {}
    for parameter in parameters:
        first_row = 0
        for source, shape in zip(parameter.sources, parameter.source_shapes, strict=True):
            places[source] = (parameter, first_row, shape)
            first_row += shape[0]
    return places


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
    return ConfigError(f"cannot write {folder}: {error.strerror}; set cache_dir to a writable folder ({need})")
