"""Runs steps of one model on one KV pool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from core.clock import monotonic
from core.errors import WorkerLost
from engine.batch import Batch, Chunk
from engine.cuda_graphs import DecodeGraphs
from engine.kv_cache import KVCache
from engine.models.llama import Llama
from engine.upload import upload


class ModelRunner:
    """Not thread-safe: steps of one pool follow one another. `graphs` takes the decode steps it fits."""

    def __init__(self, model: Llama, cache: KVCache, graphs: DecodeGraphs | None = None) -> None:
        self.model = model
        self.cache = cache
        self.device = cache.raw.device
        self._graphs = graphs

    @torch.inference_mode()
    def run(self, batch: Batch) -> torch.Tensor:
        """fp32 logits [R, vocab] in chunk order, valid until the next call, on the pool's device.

        K and V of every token are in the pool once they are read, or at once when there are none.
        """
        logits = self._graphs.run(batch) if self._graphs else None
        if logits is None:
            logits = self.model.forward(upload(batch, self.device), self.cache)
        if self.device.type == "cuda" and not len(logits):
            # Nobody waits for these results, but blocks are announced next; and a fault belongs to its step.
            torch.cuda.current_stream().synchronize()
        return logits

    def run_chunks(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """`run` of the batch that these chunks make."""
        return self.run(Batch.build(chunks, self.cache.layout.block_size))

    @torch.inference_mode()
    def copy_block(self, src: int, dst: int) -> None:
        """Copy one whole block inside the pool."""
        self.cache.copy_block(src, dst)

    @torch.inference_mode()
    def warm_up(self, steps: Iterable[Sequence[Chunk]]) -> list[float]:
        """Capture the graphs and run each step once, so that no request pays for what happens once: page
        faults of mapped weights, set-up inside libraries, compilation. Returns the seconds of each step.

        `steps`: see `engine.profile`; call before the pool is in use. Block 0 is zeros afterwards.
        """
        if self._graphs:
            self._graphs.capture(self.cache.layout.block_size)
        seconds: list[float] = []
        for chunks in steps:
            started = monotonic()
            self.run_chunks(chunks)[:1].cpu()  # which waits for the device
            seconds.append(monotonic() - started)
        self.cache.raw[0] = 0
        return seconds


class Followers(Protocol):
    """The other ranks of a tensor-parallel worker: they do what they are told, in that order, unheard.

    Every call raises WorkerLost when a rank takes nothing any more.
    """

    def run(self, batch: Batch) -> None:
        """Begin the same step; the model's group joins the ranks within it."""
        ...

    def copy_block(self, src: int, dst: int) -> None:
        """`ModelRunner.copy_block` of the rank's own pool."""
        ...


class LeadingRunner(ModelRunner):
    """Rank 0's runner. WorkerLost from it is the end: some rank may have done a part of the step.

    After `warm_up` block 0 is zeros here, in other ranks it holds what the steps left there.
    """

    def __init__(self, model: Llama, cache: KVCache, followers: Followers) -> None:
        super().__init__(model, cache)
        self._followers = followers

    def run(self, batch: Batch) -> torch.Tensor:
        self._followers.run(batch)
        try:
            return super().run(batch)
        except WorkerLost:
            raise
        except Exception as error:
            raise WorkerLost(
                f"rank 0 failed in a step that other ranks began ({type(error).__name__}); try again"
            ) from error

    def copy_block(self, src: int, dst: int) -> None:
        self._followers.copy_block(src, dst)
        super().copy_block(src, dst)
