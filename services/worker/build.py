"""Builds one worker's model, pool and engine. Blocking; runs on a thread while probes answer."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import psutil
import torch

from checkpoint.checkpoint import Checkpoint
from checkpoint.config import ModelConfig
from checkpoint.open import open_checkpoint
from core import log
from core.errors import ConfigError
from core.kv import Fingerprint, KVLayout, parse_layers
from core.settings import Settings
from engine.block_pool import BlockPool
from engine.device import resolve_device
from engine.engine import Engine
from engine.grammar import GrammarCompiler
from engine.kernels.select import select_device_kernels, select_kernels
from engine.loop import EngineLoop
from engine.messages import Event
from engine.models.dtype import check_quantization, resolve_dtype
from engine.models.registry import model_class
from engine.models.shard import rank_config, rank_weights
from engine.models.weights import load_weights
from engine.scheduler import Scheduler
from engine.step import Limits
from kvtransfer.collective_transport import CollectiveTransport
from kvtransfer.nixl_transport import NixlTransport
from kvtransfer.ranks import MakeTransport, Ranks
from kvtransfer.region import Region
from kvtransfer.shm_transport import ShmTransport
from kvtransfer.slices import rank_layout
from kvtransfer.tier_stack import TierStack
from planning import capacity
from services import address
from services.worker.kv_events import KVEventLog
from services.worker.pool import TOKEN_BUDGET, make_pool, refuse
from services.worker.ranks import RankProcesses
from services.worker.tiers import WorkerStore, make_stack

_log = log.get("worker")

Progress = Callable[[str, float], None]
"""What is being done, and how far (0-1)."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a worker takes and holds; shown at start.

    All ranks of a tensor-parallel worker together. `activations_nbytes`: the peak of the largest step.
    `other_nbytes`: host memory besides weights and pool. `concurrency`: sequences of the greatest length
    that the pool holds.
    """

    device: str
    dtype: str
    dtype_reason: str
    quantization: str
    tensor_parallel_size: int
    weights_nbytes: int
    activations_nbytes: int
    other_nbytes: int
    kv_nbytes: int
    num_blocks: int
    num_tokens: int
    max_model_len: int
    concurrency: float
    kv_dtype: str
    bytes_per_token: int
    load_s: float


@dataclass(slots=True)
class Built:
    """A worker's parts, ready to be served."""

    incarnation: str
    config: ModelConfig
    fingerprint: Fingerprint
    region: Region
    stack: TierStack | None
    loop: EngineLoop
    grammars: GrammarCompiler
    ranks: Ranks
    processes: RankProcesses | None
    offers: dict[str, list[bytes]]
    footprint: Footprint

    @property
    def failed(self) -> bool:
        """The engine broke or a rank is gone: only a new process helps."""
        return self.loop.failed or bool(self.processes and self.processes.lost)

    def close(self) -> None:
        self.loop.stop()
        self.ranks.close()
        for region in self.ranks.regions:
            region.close()
        if self.processes:
            self.processes.close()


def build(
    settings: Settings,
    worker_id: str,
    incarnation: str,
    threads: int,
    emit: Callable[[list[Event]], None],
    events: KVEventLog,
    progress: Progress,
) -> Built:
    """Load the model and lay out the pool. Raises ConfigError with a sentence for the operator."""
    started = time.monotonic()
    torch.set_num_threads(threads)
    progress("reading the model's files", 0.0)
    checkpoint = open_checkpoint(settings.model)
    config = checkpoint.config
    max_model_len = _max_model_len(config, settings)
    device = resolve_device(settings.device)
    dtype, reason = resolve_dtype(settings.dtype, device.type)
    check_quantization(settings.quantization, device.type)
    layout = _layout(config, settings, dtype)
    refuse(settings, layout, device)
    capacity.given_num_blocks(settings.num_blocks, settings.kv_cache_memory_bytes, layout.block_nbytes)
    transports = _transports(settings, worker_id, device.type)
    degree = settings.tensor_parallel_size
    part, own_layout = rank_config(config, degree), rank_layout(layout, degree)
    # They load beside us, and end when this process does or nobody holds `processes` any more.
    processes = RankProcesses(settings, layout, dtype, max_model_len) if degree > 1 else None
    cache_dir = os.path.expanduser(settings.cache_dir)
    weights = load_weights(
        checkpoint,
        dtype,
        cache_dir,
        lambda share: progress("converting weights", share),
        quantization=settings.quantization,
    )
    weights_nbytes = sum(tensor.nbytes for tensor in weights.values())
    progress("building the model", 0.0)
    if device.type == "cuda":
        plain = cast(dict[str, torch.Tensor], weights)  # int8 was refused above
        weights = {name: tensor.to(device) for name, tensor in plain.items()}
        kernels = select_device_kernels(config, layout, dtype, settings.deterministic)
    else:
        kernels = select_kernels(part, own_layout, cache_dir, settings.deterministic)
    group = None
    if processes:
        progress("waiting for the other ranks", 0.0)
        group = processes.join()
        weights = rank_weights(config, weights, degree, 0)
    model = model_class(config.architecture)(part, weights, kernels, max_model_len, group)
    limits = Limits(
        settings.block_size,
        max_model_len,
        settings.max_num_seqs,
        settings.max_num_batched_tokens or TOKEN_BUDGET[device.type],
        settings.max_waiting,
        config.sliding_window,
    )
    progress("measuring and warming up", 0.0)
    pool = make_pool(settings, model, layout, limits, device, incarnation, processes)
    region, num_blocks = pool.regions[0], pool.num_blocks
    fingerprint = _fingerprint(checkpoint, layout, max_model_len)
    stack = make_stack(settings, region, fingerprint, dtype, events)
    store = WorkerStore(region, stack, events, parks=settings.host_cache_bytes > 0)
    blocks = BlockPool(num_blocks, caching=settings.enable_prefix_caching, on_evict=store.evicted)
    scheduler = Scheduler(blocks, limits, fingerprint.namespace, store=store)
    ranks = Ranks(layout, pool.regions, transports)
    offers = ranks.offers()
    kv_nbytes = num_blocks * layout.block_nbytes
    on_host = weights_nbytes + kv_nbytes // degree if device.type == "cpu" else 0
    num_tokens = num_blocks * layout.block_size
    footprint = Footprint(
        device=_name(device),
        dtype=dtype,
        dtype_reason=reason,
        quantization=settings.quantization,
        tensor_parallel_size=degree,
        weights_nbytes=weights_nbytes,
        activations_nbytes=pool.activations_nbytes,
        other_nbytes=_other_nbytes(processes.pids if processes else [], on_host),
        kv_nbytes=kv_nbytes,
        num_blocks=num_blocks,
        num_tokens=num_tokens,
        max_model_len=max_model_len,
        concurrency=round(num_tokens / max_model_len, 2),
        kv_dtype=layout.identity,
        bytes_per_token=layout.bytes_per_token,
        load_s=time.monotonic() - started,
    )
    _log.info(
        "worker.loaded",
        model=checkpoint.name,
        dtype=dtype,
        dtype_reason=reason,
        quantization=settings.quantization,
        ranks=degree,
        device=footprint.device,
        weights=weights_nbytes,
        activations=footprint.activations_nbytes,
        kv=kv_nbytes,
        blocks=num_blocks,
        tokens=num_tokens,
        concurrency=footprint.concurrency,
    )
    if num_tokens < max_model_len:
        _log.warning(
            "worker.small_pool",
            tokens=num_tokens,
            max_model_len=max_model_len,
            hint="longer requests are refused; give more --kv-cache-memory-bytes or less --max-model-len",
        )
    return Built(
        incarnation,
        config,
        fingerprint,
        region,
        stack,
        EngineLoop(Engine(scheduler, pool.runner, emit)),
        GrammarCompiler(checkpoint.load_tokenizer, config.vocab_size, config.eos_token_ids),
        ranks,
        processes,
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
    skipped = parse_layers(settings.kv_quant_skip_layers, config.num_layers)
    return KVLayout(
        config.num_layers, config.num_kv_heads, config.head_dim, settings.block_size, kv_dtype, skipped
    )


def _fingerprint(checkpoint: Checkpoint, layout: KVLayout, max_model_len: int) -> Fingerprint:
    return Fingerprint(
        model_digest=checkpoint.weights_digest(),
        tokenizer_digest=checkpoint.tokenizer_digest,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        block_size=layout.block_size,
        kv_dtype=layout.identity,
        rope=checkpoint.config.rope_description,
        max_model_len=max_model_len,
    )


def _other_nbytes(others: Sequence[int], known_nbytes: int) -> int:
    """Host memory of this process, and what these have for themselves, beyond the known."""
    own = [psutil.Process(pid).memory_info() for pid in others]
    here = psutil.Process().memory_info().rss
    return max(0, here + sum(each.rss - each.shared for each in own) - known_nbytes)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _transports(settings: Settings, worker_id: str, device_type: str) -> dict[str, MakeTransport]:
    """What this worker offers to peers. `auto` leaves NIXL out while all peers are on this host, unless the
    pool is on a GPU, which other processes reach through NIXL alone. Raises ConfigError for shm there.
    """
    on_gpu = device_type == "cuda"
    if on_gpu and settings.transport == "shm":
        raise ConfigError(
            "--transport shm moves blocks in host memory, this worker's are on a GPU; use --transport nixl"
        )
    transports: dict[str, MakeTransport] = {}
    host, _ = address.split(settings.advertise or settings.listen, "--advertise")
    listen_host, _ = address.split(settings.listen, "--listen")
    elsewhere = not address.is_loopback(host)
    if settings.transport in ("auto", "shm") and not on_gpu:
        transports["shm"] = ShmTransport
    if settings.transport == "nixl" or (settings.transport == "auto" and (elsewhere or on_gpu)):
        transports["nixl"] = lambda region: NixlTransport(region, worker_id)
    if settings.transport == "collective":
        transports["collective"] = lambda region: CollectiveTransport(region, listen_host, host)
    return transports
