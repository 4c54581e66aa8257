"""Builds one worker's model, pool and engine. Blocking; runs on a thread while probes answer."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from checkpoint.checkpoint import Checkpoint
from checkpoint.config import ModelConfig
from checkpoint.open import open_checkpoint
from core import log
from core.errors import ConfigError
from core.kv import Fingerprint, KVLayout, parse_layers
from core.settings import Settings
from engine.block_pool import BlockPool
from engine.device import rank_device, resolve_device
from engine.engine import Engine
from engine.grammar import GrammarCompiler
from engine.kernels.select import select_device_kernels, select_kernels
from engine.loop import EngineLoop
from engine.messages import Event
from engine.models.dtype import resolve_dtype
from engine.models.llama import Llama
from engine.models.registry import model_class
from engine.models.shard import rank_config, rank_weights
from engine.models.weights import load_weights, on_device
from engine.scheduler import Scheduler
from engine.step import Limits
from kvtransfer.ranks import Ranks
from kvtransfer.slices import rank_layout
from kvtransfer.tier_stack import TierStack
from planning import capacity
from services.worker.check import check_settings
from services.worker.footprint import Footprint, announce, other_nbytes
from services.worker.kv_events import KVEventLog
from services.worker.pool import TOKEN_BUDGET, Pool, make_pool
from services.worker.ranks import RankProcesses
from services.worker.tiers import WorkerStore, make_stack, tier_pool
from services.worker.transports import transports

_log = log.get("worker")

Progress = Callable[[str, float], None]
"""What is being done, and how far (0-1)."""


@dataclass(slots=True)
class Built:
    """A worker's parts, ready to be served."""

    incarnation: str
    config: ModelConfig
    fingerprint: Fingerprint
    limits: Limits
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

    def prompt_token_s(self) -> float:
        """Seconds in which a prompt token is computed, of a prompt that fills a step."""
        per_step = self.limits.max_num_batched_tokens
        return self.loop.stats.prefill_model.prompt_seconds(per_step, 0, per_step) / per_step

    def close(self) -> None:
        """Ends the process when the engine does not end its step: its thread writes into the regions."""
        if not self.loop.stop():
            _log.error("worker.step_hangs", hint="the engine did not end its step; exiting without it")
            if self.processes:
                self.processes.kill()
            os._exit(1)
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
    job = _read(settings)
    checkpoint, config, layout, device = job.checkpoint, job.config, job.layout, job.device
    offered = transports(settings, worker_id, device.type)
    degree = settings.tensor_parallel_size
    # They load beside us, and end when this process does or nobody holds `processes` any more.
    processes = None
    if degree > 1:
        processes = RankProcesses(settings, layout, job.dtype, job.max_model_len, device)
    model, weights_nbytes = _load(settings, job, processes, progress)
    limits = Limits(
        settings.block_size,
        job.max_model_len,
        settings.max_num_seqs,
        settings.max_num_batched_tokens or TOKEN_BUDGET[device.type],
        settings.max_waiting,
        config.sliding_window,
    )
    progress("measuring and warming up", 0.0)
    pool = make_pool(settings, model, layout, limits, device, incarnation, job.num_blocks, processes)
    fingerprint = _fingerprint(checkpoint, layout, job.max_model_len)
    tiered = partial(tier_pool, layout, pool.regions, model.kernels)
    stack = make_stack(settings, tiered, fingerprint, job.dtype, events)
    store = WorkerStore(stack, events, parks=settings.host_cache_bytes > 0)
    blocks = BlockPool(pool.num_blocks, caching=settings.enable_prefix_caching, on_evict=store.evicted)
    scheduler = Scheduler(blocks, limits, fingerprint.namespace, store=store, times=pool.times)
    ranks = Ranks(layout, pool.regions, offered, model.kernels)
    offers = ranks.offers()
    footprint = _footprint(settings, job, pool, processes, weights_nbytes, started)
    announce(footprint, checkpoint.name)
    return Built(
        incarnation,
        config,
        fingerprint,
        limits,
        stack,
        EngineLoop(Engine(scheduler, pool.runner, emit)),
        GrammarCompiler(checkpoint.load_tokenizer, config.vocab_size, config.eos_token_ids),
        ranks,
        processes,
        offers,
        footprint,
    )


@dataclass(frozen=True, slots=True)
class _Job:
    """What is to be loaded, and how: of the model's files and the settings, which go together.

    `num_blocks`: of the pool, None when as many as fit.
    """

    checkpoint: Checkpoint
    config: ModelConfig
    max_model_len: int
    device: torch.device
    dtype: str
    dtype_reason: str
    layout: KVLayout
    part: ModelConfig
    part_layout: KVLayout
    num_blocks: int | None


def _read(settings: Settings) -> _Job:
    """Raises ConfigError for whatever can be known before weights are loaded."""
    checkpoint = open_checkpoint(settings.model)
    config = checkpoint.config
    max_model_len = _max_model_len(config, settings)
    device = rank_device(resolve_device(settings.device), 0, settings.tensor_parallel_size)
    dtype, reason = resolve_dtype(settings.dtype, device.type)
    layout = _layout(config, settings, dtype)
    check_settings(settings, layout, device)
    num_blocks = capacity.given_num_blocks(
        settings.num_blocks, settings.kv_cache_memory_bytes, layout.block_nbytes
    )
    degree = settings.tensor_parallel_size
    part, part_layout = rank_config(config, degree), rank_layout(layout, degree)
    return _Job(
        checkpoint, config, max_model_len, device, dtype, reason, layout, part, part_layout, num_blocks
    )


def _load(
    settings: Settings, job: _Job, processes: RankProcesses | None, progress: Progress
) -> tuple[Llama, int]:
    """The model, or rank 0's part of it, and the bytes of the whole model's weights."""
    cache_dir = os.path.expanduser(settings.cache_dir)
    weights = load_weights(
        job.checkpoint,
        job.dtype,
        cache_dir,
        lambda share: progress("converting weights", share),
        quantization=settings.quantization,
    )
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    progress("building the model", 0.0)
    if processes:
        weights = rank_weights(job.config, weights, settings.tensor_parallel_size, 0)
    if job.device.type == "cuda":
        weights = on_device(weights, job.device)
        kernels = select_device_kernels(job.part, job.part_layout, job.dtype, settings.deterministic)
    else:
        kernels = select_kernels(job.part, job.part_layout, cache_dir, settings.deterministic)
    group = None
    if processes:
        progress("waiting for the other ranks", 0.0)
        group = processes.join()
    model = model_class(job.config.architecture)(job.part, weights, kernels, job.max_model_len, group)
    return model, nbytes


def _footprint(
    settings: Settings,
    job: _Job,
    pool: Pool,
    processes: RankProcesses | None,
    weights_nbytes: int,
    started: float,
) -> Footprint:
    layout, degree = job.layout, settings.tensor_parallel_size
    kv_nbytes, num_tokens = pool.num_blocks * layout.block_nbytes, pool.num_blocks * layout.block_size
    on_host = weights_nbytes + kv_nbytes // degree if job.device.type == "cpu" else 0
    return Footprint(
        device=torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else "cpu",
        dtype=job.dtype,
        dtype_reason=job.dtype_reason,
        quantization=settings.quantization,
        tensor_parallel_size=degree,
        weights_nbytes=weights_nbytes,
        activations_nbytes=pool.activations_nbytes,
        other_nbytes=other_nbytes(processes.pids if processes else [], on_host),
        kv_nbytes=kv_nbytes,
        num_blocks=pool.num_blocks,
        num_tokens=num_tokens,
        max_model_len=job.max_model_len,
        concurrency=round(num_tokens / job.max_model_len, 2),
        kv_dtype=layout.identity,
        bytes_per_token=layout.bytes_per_token,
        load_s=time.monotonic() - started,
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
