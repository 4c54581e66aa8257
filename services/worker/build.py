"""Builds one worker's model, pool and engine. Blocking; runs on a thread while probes answer."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch

from checkpoint.checkpoint import Checkpoint
from checkpoint.config import ModelConfig
from checkpoint.open import open_checkpoint
from core import log
from core.errors import ConfigError
from core.kv import Fingerprint, KVLayout
from core.settings import Settings
from engine.block_pool import BlockPool
from engine.engine import Engine
from engine.kernels.select import select_kernels
from engine.kv_cache import KVCache
from engine.loop import EngineLoop
from engine.messages import Event
from engine.models.dtype import resolve_dtype
from engine.models.registry import model_class
from engine.models.weights import load_weights
from engine.runner import ModelRunner
from engine.scheduler import Scheduler
from engine.step import Limits
from kvtransfer.nixl_transport import NixlTransport
from kvtransfer.region import Region
from kvtransfer.shm_transport import ShmTransport
from kvtransfer.transport import Transport
from services import address

MIN_BLOCKS = 2
"""A sequence needs a block for its prompt and one to grow into."""

_log = log.get("worker")

Progress = Callable[[str, float], None]
"""What is being done, and how far (0-1)."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a worker takes and holds; shown at start."""

    dtype: str
    dtype_reason: str
    weights_nbytes: int
    other_nbytes: int
    kv_nbytes: int
    num_blocks: int
    num_tokens: int
    bytes_per_token: int
    load_s: float


@dataclass(slots=True)
class Built:
    """A worker's parts, ready to be served."""

    incarnation: str
    config: ModelConfig
    fingerprint: Fingerprint
    region: Region
    loop: EngineLoop
    transports: list[Transport]
    offers: dict[str, bytes]
    footprint: Footprint

    def close(self) -> None:
        self.loop.stop()
        for transport in self.transports:
            transport.close()
        self.region.close()


def build(
    settings: Settings,
    worker_id: str,
    incarnation: str,
    threads: int,
    emit: Callable[[list[Event]], None],
    progress: Progress,
) -> Built:
    """Load the model and lay out the pool. Raises ConfigError with a sentence for the operator."""
    started = time.monotonic()
    torch.set_num_threads(threads)
    progress("reading the model's files", 0.0)
    checkpoint = open_checkpoint(settings.model)
    config = checkpoint.config
    max_model_len = _max_model_len(config, settings)
    dtype, reason = resolve_dtype(settings.dtype)
    layout = _layout(config, settings, dtype)
    num_blocks = _num_blocks(settings, layout)
    cache_dir = os.path.expanduser(settings.cache_dir)
    weights = load_weights(
        checkpoint,
        dtype,
        cache_dir,
        lambda share: progress("converting weights", share),
    )
    progress("building the model", 0.0)
    kernels = select_kernels(config, layout, cache_dir)
    model = model_class(config.architecture)(config, weights, kernels, max_model_len)
    region = Region.create(num_blocks, layout.block_nbytes, incarnation)
    cache = KVCache(layout, num_blocks, region.data)
    runner = ModelRunner(model, cache)
    progress("warming up", 0.0)
    runner.warm_up()
    fingerprint = _fingerprint(checkpoint, layout, max_model_len)
    scheduler = Scheduler(
        BlockPool(num_blocks, caching=settings.enable_prefix_caching),
        Limits(
            settings.block_size,
            max_model_len,
            settings.max_num_seqs,
            settings.max_num_batched_tokens,
            settings.max_waiting,
        ),
        fingerprint.namespace,
    )
    transports = _transports(settings, worker_id, region)
    offers = {transport.name: transport.offer() for transport in transports}
    weights_nbytes = sum(tensor.nbytes for tensor in weights.values())
    kv_nbytes = num_blocks * layout.block_nbytes
    footprint = Footprint(
        dtype=dtype,
        dtype_reason=reason,
        weights_nbytes=weights_nbytes,
        other_nbytes=max(0, psutil.Process().memory_info().rss - weights_nbytes - kv_nbytes),
        kv_nbytes=kv_nbytes,
        num_blocks=num_blocks,
        num_tokens=num_blocks * layout.block_size,
        bytes_per_token=layout.bytes_per_token,
        load_s=time.monotonic() - started,
    )
    _log.info("worker.loaded", model=checkpoint.name, dtype=dtype, dtype_reason=reason, blocks=num_blocks)
    return Built(
        incarnation,
        config,
        fingerprint,
        region,
        EngineLoop(Engine(scheduler, runner, emit)),
        transports,
        offers,
        footprint,
    )


def _max_model_len(config: ModelConfig, settings: Settings) -> int:
    longest = settings.max_model_len or config.max_position
    if longest > config.max_position:
        raise ConfigError(
            f"--max-model-len {longest} is beyond the model's context of {config.max_position} tokens"
        )
    return longest


def _layout(config: ModelConfig, settings: Settings, dtype: str) -> KVLayout:
    kv_dtype = dtype if settings.kv_cache_dtype == "auto" else settings.kv_cache_dtype
    return KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, settings.block_size, kv_dtype)


def _num_blocks(settings: Settings, layout: KVLayout) -> int:
    """Blocks of the pool (whether it fits into memory, `Region.create` says)."""
    if settings.num_blocks is not None:
        if settings.num_blocks < MIN_BLOCKS:
            raise ConfigError(f"--num-blocks {settings.num_blocks} is too few; give at least {MIN_BLOCKS}")
        return settings.num_blocks
    num_blocks = layout.num_blocks_in(settings.kv_cache_memory_bytes)
    if num_blocks < MIN_BLOCKS:
        raise ConfigError(
            f"--kv-cache-memory-bytes {settings.kv_cache_memory_bytes} holds {num_blocks} blocks of "
            f"{layout.block_nbytes} bytes; give at least {MIN_BLOCKS * layout.block_nbytes}"
        )
    return num_blocks


def _fingerprint(checkpoint: Checkpoint, layout: KVLayout, max_model_len: int) -> Fingerprint:
    return Fingerprint(
        model_digest=checkpoint.weights_digest(),
        tokenizer_digest=checkpoint.tokenizer_digest,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        block_size=layout.block_size,
        kv_dtype=layout.kv_dtype,
        rope=checkpoint.config.rope_description,
        max_model_len=max_model_len,
    )


def _transports(settings: Settings, worker_id: str, region: Region) -> list[Transport]:
    """What this worker offers to peers. `auto` leaves NIXL out while all peers are on this host."""
    offers: list[Transport] = []
    if settings.transport in ("auto", "shm"):
        offers.append(ShmTransport(region))
    host, _ = address.split(settings.advertise or settings.listen, "--advertise")
    elsewhere = not address.is_loopback(host)
    if settings.transport == "nixl" or (settings.transport == "auto" and elsewhere):
        offers.append(NixlTransport(region, worker_id))
    return offers
