"""A worker's KV pool: a profiling run, the account of its memory, the memory for its blocks, the warm-up."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from core.kv import KVLayout
from core.settings import Settings
from engine import sampler
from engine.batch import Chunk
from engine.cuda_graphs import CudaCapture, DecodeGraphs, graph_sizes
from engine.kv_cache import KVCache
from engine.models.llama import Llama
from engine.profile import largest_decodes, largest_steps, peak_nbytes, small_steps, typical_steps
from engine.runner import LeadingRunner, ModelRunner
from engine.step import MAX_PROMPT_LOGPROBS, Limits
from engine.step_fit import StepLoad, StepTimes
from kvtransfer.device_region import DeviceRegion
from kvtransfer.memory import available_nbytes
from kvtransfer.region import Region
from kvtransfer.slices import rank_layout
from planning import capacity
from planning.capacity import MemoryUse
from services.worker.ranks import RankProcesses

TOKEN_BUDGET = {"cpu": 256, "cuda": 2048}
"""Tokens of a step where nothing is said: by then either kind of device is busy enough."""


@dataclass(frozen=True, slots=True)
class Pool:
    """`regions`: the blocks for transports, of each rank; `runner`: the model on them, warm.

    `activations_nbytes`: of all ranks. `times`: of the first steps.
    """

    regions: tuple[Region, ...]
    runner: ModelRunner
    activations_nbytes: int
    times: StepTimes

    @property
    def num_blocks(self) -> int:
        return self.regions[0].num_blocks


def make_pool(
    settings: Settings,
    model: Llama,
    layout: KVLayout,
    limits: Limits,
    device: torch.device,
    incarnation: str,
    num_blocks: int | None = None,
    ranks: RankProcesses | None = None,
) -> Pool:
    """Measure, lay out and warm up. `layout`: the whole model's. `num_blocks`: as the settings give them,
    None: as many as fit. Raises ConfigError when no pool fits, with the numbers."""
    degree = settings.tensor_parallel_size
    own = rank_layout(layout, degree)
    # A graph of one rank would have to be replayed in all of them at once.
    eager = settings.enforce_eager or degree > 1
    each = _profile(model, own, limits, device, ranks, eager=eager)
    activations = degree * each
    if num_blocks is None:
        # Ranks share the memory of a host; on GPUs each has one of its own.
        on_gpu = device.type == "cuda"
        num_blocks = _fitting_blocks(
            settings, own if on_gpu else layout, device, each if on_gpu else activations
        )
    cache, regions = _lay_out(own, num_blocks, device, incarnation, degree, ranks)
    graphs = _graphs(model, cache, limits) if device.type == "cuda" and not eager else None
    runner = LeadingRunner(model, cache, ranks) if ranks else ModelRunner(model, cache, graphs)
    times = StepTimes(limits.max_num_batched_tokens, limits.max_num_seqs)
    steps = [*small_steps(limits), *typical_steps(limits)]
    for chunks, seconds in zip(steps, runner.warm_up(steps), strict=True):
        times.measured(StepLoad.of((chunk.start, len(chunk)) for chunk in chunks), seconds)
    if device.type == "cuda":
        sampler.warm_up(model.config.vocab_size, device)
        torch.cuda.synchronize(device)
    return Pool(regions, runner, activations, times)


def _lay_out(
    own: KVLayout,
    num_blocks: int,
    device: torch.device,
    incarnation: str,
    degree: int,
    ranks: RankProcesses | None,
) -> tuple[KVCache, tuple[Region, ...]]:
    """Rank 0's pool, and each rank's region. `own`: the layout of a rank."""
    lives = [incarnation, *(f"{incarnation}/{rank}" for rank in range(1, degree))]
    if device.type == "cuda":
        cache = KVCache(own, num_blocks, device=device)
        others = ranks.allocate(num_blocks, own.block_nbytes, lives[1:]) if ranks else []
        return cache, (DeviceRegion(cache.raw, incarnation), *others)
    regions = tuple(Region.create(num_blocks, own.block_nbytes, life) for life in lives)
    if ranks:
        ranks.use(regions)
    return KVCache(own, num_blocks, regions[0].data), regions


def _profile(
    model: Llama,
    layout: KVLayout,
    limits: Limits,
    device: torch.device,
    ranks: RankProcesses | None,
    *,
    eager: bool,
) -> int:
    """Bytes of the activations of this rank's largest step, and unless `eager` of the largest graph."""
    cache = KVCache(layout, 1, device=device)
    runner = LeadingRunner(model, cache, ranks) if ranks else ModelRunner(model, cache)
    runner.warm_up(small_steps(limits))  # weights come into memory: not counted
    if device.type == "cpu":
        # A chunk alone has no more rows, a long history takes seconds: both take next to no more memory.
        return peak_nbytes(device, lambda: _run(runner, largest_steps(limits, history=0)[-1]))

    def run_largest() -> None:
        for chunks in largest_steps(limits, limits.max_model_len):
            _run(runner, chunks)

    peak = peak_nbytes(device, run_largest)
    if not eager:
        peak += peak_nbytes(device, lambda: runner.run_chunks(largest_decodes(limits)))
    gc.collect()
    torch.cuda.empty_cache()
    return peak


def _run(runner: ModelRunner, chunks: Sequence[Chunk]) -> None:
    """One step, and the log probabilities that prompts may ask for."""
    logits = runner.run_chunks(chunks)[:MAX_PROMPT_LOGPROBS]
    sampler.logprobs_of(logits, [0] * len(logits), [1] * len(logits))


def _fitting_blocks(settings: Settings, layout: KVLayout, device: torch.device, activations: int) -> int:
    utilization = settings.gpu_memory_utilization
    if device.type == "cpu":
        if utilization is None:
            return capacity.CPU_POOL_NBYTES // layout.block_nbytes
        available = available_nbytes()
        use = MemoryUse(available, available, 0, activations, 0)
    else:
        free, total = torch.cuda.mem_get_info(device)
        weights = torch.cuda.memory_allocated(device)
        # Beside a rank's own CUDA context its GPU holds rank 0's, which hands its blocks over.
        reserve = capacity.GPU_RESERVE_NBYTES * min(2, settings.tensor_parallel_size)
        use = MemoryUse(total, free, weights, activations, reserve)
        utilization = (utilization or capacity.GPU_UTILIZATION) / settings.workers_per_gpu
    return capacity.num_blocks_within(use, utilization, layout.block_nbytes)


def _graphs(model: Llama, cache: KVCache, limits: Limits) -> DecodeGraphs:
    width = -(-limits.max_model_len // limits.block_size)
    return DecodeGraphs(
        lambda batch: model.forward(batch, cache),
        cache.raw.device,
        graph_sizes(limits.max_num_seqs),
        width,
        model.config.vocab_size,
        CudaCapture(),
    )
