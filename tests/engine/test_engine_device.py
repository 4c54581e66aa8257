"""What runs on a GPU, on tensors of the CPU: Triton kernels interpreted, graphs that replay by running again."""

from __future__ import annotations

from pathlib import Path

import interpreted_triton  # noqa: F401  (before every import of the kernels)
import pytest
import torch
from tiny_llama import TinyCheckpoint, dense_logits, run_chunks, scattered_tables, tiny_config, tiny_runner

from core.blocks import BlockHasher
from core.request import Request, SamplingParams
from engine.batch import Batch, Chunk
from engine.cuda_graphs import DecodeGraphs, graph_sizes, pad, size_for
from engine.kernels import reference
from engine.kernels.torch_kernels import TorchKernels
from engine.kernels.triton.kernels import TritonKernels
from engine.models.rope import rope_frequencies
from engine.profile import small_steps
from engine.runner import ModelRunner
from engine.sampler import Draw, choose_together, uniform, warm_up
from engine.sequence import Sequence
from engine.step import Limits
from engine.upload import packed_nbytes, upload

# Numpy warns where hardware silently goes to infinity, in lanes that a mask drops.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CPU = torch.device("cpu")
IDS = [int(i) for i in torch.randint(97, (60,), generator=torch.Generator().manual_seed(1))]


def decodes(*lengths: int, block_size: int = 16) -> list[Chunk]:
    """A decode of each sequence: the token at position `length` of IDS."""
    tables = scattered_tables([length + 1 for length in lengths], block_size, 2048 // block_size - 1)
    return [Chunk([IDS[n]], n, table, 0) for n, table in zip(lengths, tables, strict=True)]


# ---- the model


class Replays:
    """Captures by keeping the work, and counts the replays."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, work):
        work()

        def replay() -> None:
            self.count += 1
            work()

        return replay


def with_graphs(runner: ModelRunner, sizes: tuple[int, ...], width: int) -> tuple[ModelRunner, Replays]:
    replays, model, cache = Replays(), runner.model, runner.cache
    graphs = DecodeGraphs(lambda b: model.forward(b, cache), CPU, sizes, width, 97, replays)
    return ModelRunner(model, cache, graphs), replays


def test_prefill_and_graphed_decodes_give_the_oracles_logits(tmp_path: Path) -> None:
    config = tiny_config()
    want = dense_logits(TinyCheckpoint(config), IDS, rope_frequencies(config))
    runner, replays = with_graphs(tiny_runner(TritonKernels(), tmp_path), (1, 2, 4), 5)
    runner.warm_up(small_steps(Limits(16, 80, 4, 32, 8)))
    assert not runner.cache.pool[0].any()
    replayed = replays.count
    lengths = (20, 5, 17)
    steps = decodes(*lengths)
    got = runner.run_chunks(
        [Chunk(IDS[:n], 0, c.block_table, 0) for n, c in zip(lengths, steps, strict=True)]
    )
    torch.testing.assert_close(got, torch.cat([want[:n] for n in lengths]), rtol=1e-4, atol=1e-4)
    assert replays.count == replayed
    poison = runner.cache.pool.isnan().flatten(1).all(1)
    torch.testing.assert_close(runner.run_chunks(steps), want[list(lengths)], rtol=1e-4, atol=1e-4)
    assert replays.count == replayed + 1
    # Padding rows store nothing: the blocks of nobody are as poisoned as before.
    assert torch.equal(runner.cache.pool.isnan().flatten(1).all(1), poison)
    alone = Chunk([IDS[21]], 21, steps[0].block_table, 0)
    torch.testing.assert_close(runner.run_chunks([alone])[0], want[21], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_blocks_hold_what_the_torch_set_would_store(kv_dtype: str, tmp_path: Path) -> None:
    got, want = (tiny_runner(set_(), tmp_path, kv_dtype=kv_dtype) for set_ in (TritonKernels, TorchKernels))
    for chunk in (
        Chunk(IDS[:17], 0, [5, 2], 16),
        Chunk(IDS[17:30], 17, [5, 2], 0),
        Chunk([3], 30, [5, 2], 0),
    ):
        torch.testing.assert_close(run_chunks(got, chunk), run_chunks(want, chunk), rtol=1e-4, atol=1e-4)


# ---- graphs


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (16, (1, 2, 4, 8, 16)),
        (64, (1, 2, 4, 8, 16, 24, 32, 64)),
        (100, (1, 2, 4, 8, 16, 24, 32, 64, 96, 100)),
    ],
)
def test_graph_sizes_end_with_the_largest_batch(max_num_seqs: int, sizes: tuple[int, ...]) -> None:
    assert graph_sizes(max_num_seqs) == sizes


def test_beyond_the_largest_graph_batches_run_without() -> None:
    assert graph_sizes(5000)[-1] == 512


@pytest.mark.parametrize(
    ("chunks", "size"),
    [
        (decodes(3), 1),
        (decodes(3, 4, 5), 4),
        (decodes(3, 4, 5, 6), 4),
        (decodes(3, 4, 5, 6, 7), None),
        (decodes(59), 1),
        ([Chunk([1], 64, [1, 2, 3, 4, 5], 0)], None),
        ([*decodes(3), Chunk([1, 2], 0, [9], 1)], None),
        ([*decodes(3), Chunk([1], 0, [9], None)], None),
    ],
    ids=["fits", "next", "exact", "too many", "widest", "too long", "prefill", "no logits"],
)
def test_which_graph_a_batch_takes(chunks: list[Chunk], size: int | None) -> None:
    assert size_for(Batch.build(chunks, 16), (1, 2, 4), table_width=4) == size


def test_padding_has_no_tokens_and_no_slots() -> None:
    batch = Batch.build([Chunk([7], 20, [3, 5], 0), Chunk([8], 2, [4], 0)], 16)
    padded = pad(batch, 4)
    assert padded.token_ids.tolist() == [7, 8, 0, 0]
    assert padded.positions.tolist() == [20, 2, 0, 0]
    assert padded.slots.tolist() == [84, 66, -1, -1]
    assert padded.kv_lens.tolist() == [21, 3, 0, 0]
    assert padded.block_tables.tolist() == [[3, 5], [4, 0], [0, 0], [0, 0]]
    assert padded.q_starts == tuple(padded.row_starts.tolist()) == (0, 1, 2, 3, 4)
    assert padded.logits_rows.tolist() == [0, 1, 2, 3]
    assert (padded.num_decodes, padded.num_seqs, padded.num_tokens) == (4, 4, 4)


def test_a_step_uploads_the_tables_it_has_beside_those_of_wider_steps() -> None:
    """A graph reads the same tensors in every step; only the batch's own columns are written."""
    seen: list[Batch] = []

    def forward(batch: Batch) -> torch.Tensor:
        seen.append(batch)
        return torch.zeros(batch.num_seqs, 97)

    graphs = DecodeGraphs(forward, CPU, (1, 4), 8000, 97, Replays())
    graphs.capture(16)
    for chunks in (
        [Chunk([7], 60, [9, 8, 7, 6], 0), Chunk([8], 20, [5, 4], 0)],
        [Chunk([6], 3, [3], 0), Chunk([5], 17, [1, 2], 0), Chunk([4], 2, [4], 0)],
    ):
        batch = Batch.build(chunks, 16)
        logits = graphs.run(batch)
        assert logits is not None
        assert logits.shape == (len(chunks), 97)
        read, n, width = seen[-1], *batch.block_tables.shape
        assert read is seen[0]  # size 4 was captured first
        assert torch.equal(read.block_tables[:n, :width], batch.block_tables)
        assert read.block_tables.shape == (4, 8000)
        assert read.kv_lens.tolist() == [*batch.kv_lens.tolist(), *[0] * (4 - n)]
        assert read.token_ids[:n].tolist() == batch.token_ids.tolist()
        assert read.slots[:n].tolist() == batch.slots.tolist()


# ---- upload


def test_a_batch_arrives_whole_in_a_buffer_and_replaces_the_last_one() -> None:
    first, second = (
        Batch.build([Chunk(range(n, n + 5), 10, [1, n], 2), Chunk([n], 30, [2, 3], 0)], 16) for n in (4, 6)
    )
    buffer = torch.zeros(packed_nbytes(first), dtype=torch.uint8)
    held = upload(first, CPU, buffer)
    upload(second, CPU, buffer)
    for name in ("token_ids", "positions", "slots", "logits_rows", "row_starts", "kv_lens", "block_tables"):
        view = getattr(held, name)
        assert torch.equal(view, getattr(second, name)), name
        assert (view.data_ptr() - buffer.data_ptr()) % 64 == 0
    assert upload(first, CPU) is first
    with pytest.raises(ValueError, match="does not fit"):
        upload(first, CPU, buffer[64:])


# ---- draws


def draw_of(row: int, output: tuple[int, ...] = (), **given: object) -> Draw:
    params = SamplingParams(**({"max_tokens": 99, "seed": 5} | given))  # type: ignore[arg-type]
    request = Request("r", (1, 2), params)
    return Draw(row, Sequence("s", [1, 2, *output], 2, BlockHasher(b"", "", 8), 0, 0.0, request), 0)


def test_draws_of_a_batch_are_those_of_the_twin_with_the_same_uniforms() -> None:
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(3)) * 3
    best = logits.argmax(-1).tolist()
    draws = [
        draw_of(2, temperature=0.8, top_p=0.9),
        draw_of(0, temperature=1.2, top_k=20, min_p=0.01),
        draw_of(0, (4, 4), temperature=1.2),
        draw_of(1, temperature=0.0, logit_bias=((17, 100.0),)),
        draw_of(1, (best[1],) * 3, temperature=0.0, frequency_penalty=2.0, presence_penalty=2.0),
    ]
    warm_up(500, CPU)
    before = logits.clone()
    got = choose_together(logits, draws)
    assert torch.equal(logits, before)
    params = [
        (0.8, 0, 0.9, 0.0, uniform(5, 2)),
        (1.2, 20, 1.0, 0.01, uniform(5, 2)),
        (1.2, 0, 1.0, 0.0, uniform(5, 4)),
    ]
    assert got[:3] == reference.sample(logits[[2, 0, 0]], torch.tensor(params)).tolist()
    assert got[3] == 17
    assert got[4] != best[1]
    assert choose_together(logits, draws[1:]) == got[1:]


def test_masks_bind_their_own_rows_alone() -> None:
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(3))
    best = logits.argmax(-1).tolist()
    draws = [
        draw_of(0, temperature=0.0, logit_bias=((17, 100.0),)),
        draw_of(1, temperature=0.0, allowed_token_ids=(4, 9)),
        draw_of(2, temperature=0.0, bad_words=((best[2],),)),
        draw_of(2, temperature=0.0),
    ]
    got = choose_together(logits, draws)
    assert got[0] == 17
    assert got[1] == max((4, 9), key=lambda token_id: logits[1, token_id])
    assert got[2] == logits[2].topk(2).indices[1]
    assert got[3] == best[2]
