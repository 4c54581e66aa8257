"""Decode steps as captured CUDA graphs: one launch instead of some hundred.

A graph is captured for each of a few batch sizes; a batch is padded to the next one. Padding rows have no
tokens (kv_len 0, so attention gives zeros) and store nothing (slot -1). Everything a graph reads or writes
lies in buffers that stay and that all graphs share, since one runs at a time: the batch is copied into them,
logits are read from them.

A graph reads block tables as wide as the longest sequence may need. A step copies only the columns that its
batch has: what is right of them is old, and kv_lens keep every kernel from reading it.

    tables [sizes[-1], table_width]    | this step's columns | of earlier steps: block ids all the same |
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from engine.batch import Batch, Chunk
from engine.upload import packed_nbytes, upload

MAX_GRAPH_SIZE = 512

Work = Callable[[], None]

Capture = Callable[[Work], Work]
"""Records the work, and gives what does it again."""


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """The captured batch sizes, ascending; the last one is max_num_seqs, or the largest worth a graph."""
    last = min(max_num_seqs, MAX_GRAPH_SIZE)
    steps = (1, 2, 4, *range(8, 32, 8), *range(32, MAX_GRAPH_SIZE, 32))
    return (*(size for size in steps if size < last), last)


def size_for(batch: Batch, sizes: Sequence[int], table_width: int) -> int | None:
    """The captured size that this batch is padded to; None when it is no case for a graph.

    That is a batch with more than decodes, more sequences or longer tables than captured, or one of whose
    single tokens no logits are wanted (the last piece of a prefill job).
    """
    n = batch.num_seqs
    if batch.num_decodes < n or len(batch.logits_rows) < n or batch.block_tables.shape[1] > table_width:
        return None
    at = bisect_left(sizes, n)
    return sizes[at] if at < len(sizes) else None


def pad(batch: Batch, size: int) -> Batch:
    """A batch of decodes as one of `size` sequences."""
    missing = size - batch.num_seqs
    rows = torch.arange(size)
    return replace(
        batch,
        token_ids=F.pad(batch.token_ids, (0, missing)),
        positions=F.pad(batch.positions, (0, missing)),
        slots=F.pad(batch.slots, (0, missing), value=-1),
        q_starts=tuple(range(size + 1)),
        row_starts=torch.arange(size + 1, dtype=torch.int32),
        kv_lens=F.pad(batch.kv_lens, (0, missing)),
        block_tables=F.pad(batch.block_tables, (0, 0, 0, missing)),
        logits_rows=rows,
        num_decodes=size,
    )


class DecodeGraphs:
    """The graphs of one model on one pool. Call under `torch.inference_mode`, from one thread at a time.

    `forward`: fp32 logits [rows, vocab] of a batch on `device`. `capture`: `CudaCapture` on CUDA.
    """

    def __init__(
        self,
        forward: Callable[[Batch], torch.Tensor],
        device: torch.device,
        sizes: Sequence[int],
        table_width: int,
        vocab_size: int,
        capture: Capture,
    ) -> None:
        self._forward, self._device, self._capture = forward, device, capture
        self.sizes, self.table_width = tuple(sizes), table_width
        self._logits = torch.empty(self.sizes[-1], vocab_size, dtype=torch.float32, device=device)
        self._tables = torch.zeros(self.sizes[-1], table_width, dtype=torch.int32, device=device)
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._replays: dict[int, Work] = {}

    def capture(self, block_size: int) -> None:
        """Capture all sizes, the largest first, so that the smaller ones find its memory. Writes block 0."""
        one = Batch.build([Chunk([0], 0, [0], 0)], block_size)
        widest = replace(pad(one, self.sizes[-1]), block_tables=self._tables)
        self._buffer = torch.empty(packed_nbytes(widest), dtype=torch.uint8, device=self._device)
        for size in reversed(self.sizes):
            batch = replace(self._upload(pad(one, size)), block_tables=self._tables[:size])
            self._replays[size] = self._capture(partial(self._work, batch, size))

    def run(self, batch: Batch) -> torch.Tensor | None:
        """fp32 logits [sequences, vocab], valid until the next call; None when no captured graph fits."""
        size = size_for(batch, self.sizes, self.table_width)
        if size is None or size not in self._replays:
            return None
        tables = self._upload(pad(batch, size)).block_tables
        self._tables[:size, : tables.shape[1]].copy_(tables)
        self._replays[size]()
        return self._logits[: batch.num_seqs]

    def _upload(self, batch: Batch) -> Batch:
        """Into the first bytes of the buffer: all but the tables lies where it lay at the capture."""
        return upload(batch, self._device, self._buffer[: packed_nbytes(batch)])

    def _work(self, batch: Batch, size: int) -> None:
        self._logits[:size].copy_(self._forward(batch))


class CudaCapture:
    """Captures into one memory pool: graphs run one after the other, so they may share it."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        """Runs the work once before: kernels are compiled and libraries set up outside the capture."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        return graph.replay
