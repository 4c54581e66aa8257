"""Workers of other tensor-parallel degrees: the arithmetic of head slices, and pulls that use it."""

import asyncio
import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from kv_owner import make_transport

from core.clock import monotonic
from core.errors import ChecksumMismatch, ConfigError, IncompatiblePeer, LeaseLost, PeerLost, SourceFailed
from core.kv import KVLayout
from engine.kernels.torch_kernels import TorchKernels
from engine.kv_cache import KVCache
from kvtransfer import ranks as ranks_module
from kvtransfer.checksum import checksum
from kvtransfer.device_region import DeviceRegion
from kvtransfer.leases import LeaseView
from kvtransfer.ledger import Ledger
from kvtransfer.puller import Puller
from kvtransfer.ranks import Ranks
from kvtransfer.region import Region
from kvtransfer.slices import HeadSlice, heads_of, plan_slices, rank_layout
from kvtransfer.transport import FakePool, FakeTransport, ReadPending

REMOTE = [6, 2, 3, 4, 0, 7, 5]
LOCAL = [1, 0, 5, 6, 3, 2, 7]
DEGREES = [(3, 1, 3), (3, 3, 1), (3, 3, 3), (3, 1, 1), (4, 2, 4), (4, 4, 2), (6, 2, 3), (6, 3, 2), (8, 8, 2)]


@pytest.mark.parametrize(
    ("num_kv_heads", "src", "dst", "expected"),
    [
        (3, 1, 1, [(0, 0, 0, 0, 3)]),
        (3, 3, 3, [(0, 0, 0, 0, 1), (1, 0, 1, 0, 1), (2, 0, 2, 0, 1)]),
        (3, 1, 3, [(0, 0, 0, 0, 1), (0, 1, 1, 0, 1), (0, 2, 2, 0, 1)]),
        (3, 3, 1, [(0, 0, 0, 0, 1), (1, 0, 0, 1, 1), (2, 0, 0, 2, 1)]),
        (4, 2, 4, [(0, 0, 0, 0, 1), (0, 1, 1, 0, 1), (1, 0, 2, 0, 1), (1, 1, 3, 0, 1)]),
        (8, 4, 2, [(0, 0, 0, 0, 2), (1, 0, 0, 2, 2), (2, 0, 1, 0, 2), (3, 0, 1, 2, 2)]),
        (6, 2, 3, [(0, 0, 0, 0, 2), (0, 2, 1, 0, 1), (1, 0, 1, 1, 1), (1, 1, 2, 0, 2)]),
        (6, 3, 2, [(0, 0, 0, 0, 2), (1, 0, 0, 2, 1), (1, 1, 1, 0, 1), (2, 0, 1, 1, 2)]),
    ],
)
def test_slices(num_kv_heads, src, dst, expected):
    assert plan_slices(num_kv_heads, src, dst) == tuple(HeadSlice(*each) for each in expected)


def test_every_head_goes_to_its_place_once():
    for num_kv_heads in (1, 3, 8, 12, 30):
        degrees = [t for t in range(1, num_kv_heads + 1) if num_kv_heads % t == 0]
        for src, dst in itertools.product(degrees, degrees):
            pairs = [
                (theirs, ours)
                for s in plan_slices(num_kv_heads, src, dst)
                for theirs, ours in zip(
                    heads_of(num_kv_heads, src, s.src_rank)[s.src_head : s.src_head + s.num_heads],
                    heads_of(num_kv_heads, dst, s.dst_rank)[s.dst_head : s.dst_head + s.num_heads],
                    strict=True,
                )
            ]
            assert sorted(pairs) == [(head, head) for head in range(num_kv_heads)]


def test_bytes_of_a_slice_in_a_row():
    layout = KVLayout(30, 3, 64, 16, "fp32")
    assert layout.head_nbytes(0) == 8192
    assert layout.block_nbytes == 30 * 3 * layout.head_nbytes(0)
    assert rank_layout(layout, 3).block_nbytes == 30 * layout.head_nbytes(0)


@pytest.mark.parametrize("degree", [0, 2, 4, 6])
def test_heads_that_do_not_divide_are_refused(degree):
    with pytest.raises(ConfigError, match=rf"3 KV heads.*over {degree}.*choose one of 1, 3"):
        rank_layout(KVLayout(1, 3, 8, 8, "fp32"), degree)
    with pytest.raises(IncompatiblePeer, match=f"tensor_parallel_size: 3 here, {degree} there"):
        plan_slices(3, degree, 3)


class Side:
    """A worker of some degree. Its blocks hold `whole` `[num_blocks, layers, heads, head_nbytes]`."""

    def __init__(
        self,
        num_kv_heads: int,
        degree: int,
        incarnation: str,
        seed: int | None = None,
        make: Callable = FakeTransport,
        name: str = "fake",
        make_region: Callable[[int, int, str], Region] = Region.create,
    ) -> None:
        self.layout = self.layout_of(num_kv_heads)
        each = rank_layout(self.layout, degree)
        self.regions = [make_region(8, each.block_nbytes, f"{incarnation}/{rank}") for rank in range(degree)]
        if seed is not None:
            shape = (8, 4, num_kv_heads, self.layout.head_nbytes(0))
            whole = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
            for rank, rows in enumerate(self.rows()):
                rows[:] = whole[:, :, list(heads_of(num_kv_heads, degree, rank))]
        self.ranks = Ranks(self.layout, self.regions, {name: make}, TorchKernels())

    @staticmethod
    def layout_of(num_kv_heads: int) -> KVLayout:
        return KVLayout(4, num_kv_heads, 16, 8, "fp32")

    def rows(self) -> list[np.ndarray]:
        return [np.asarray(r.blocks).reshape(8, 4, -1, self.layout.head_nbytes(0)) for r in self.regions]

    @property
    def whole(self) -> np.ndarray:
        return np.concatenate(self.rows(), axis=2)

    def close(self) -> None:
        self.ranks.close()
        for region in self.regions:
            region.close()


class Pair:
    """D pulls from P; `pools`: P's ranks as D's fake transports reach them."""

    def __init__(self, num_kv_heads: int, src: int, dst: int) -> None:
        self.pools: list[FakePool] = []
        pools = self.pools

        class Recording(FakeTransport):
            def connect(self, offer: bytes) -> FakePool:
                pools.append(super().connect(offer))
                return pools[-1]

        self.theirs = Side(num_kv_heads, src, "p", seed=1)
        self.ours = Side(num_kv_heads, dst, "d", make=Recording)
        self.quiet: list[int] = []
        self.ledger = Ledger(self.quiet.extend)
        self.puller = Puller(self.ledger, timeout_s=2.0)
        self.offers = self.theirs.ranks.offers()["fake"]
        self.peer = self.ours.ranks.connect("fake", self.offers)
        self.lease = LeaseView(monotonic)
        self.lease.renewed(monotonic(), 60.0)

    async def pull(self, peer=None, sums=None):
        sums = self.theirs.ranks.checksums(REMOTE) if sums is None else sums
        return await self.puller.pull(peer or self.peer, REMOTE, LOCAL, sums, self.lease, "r")

    def close(self) -> None:
        self.puller.close()
        self.ours.close()
        self.theirs.close()


@pytest.fixture
def make_pair(monkeypatch):
    monkeypatch.setattr(ranks_module, "STAGING_NBYTES", 25_000)  # one to a few blocks at a time
    pairs: list[Pair] = []

    def make(*degrees: int) -> Pair:
        pairs.append(Pair(*degrees))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


@pytest.mark.parametrize("degrees", DEGREES)
async def test_heads_arrive_where_they_belong(make_pair, degrees):
    pair = make_pair(*degrees)
    stats = await pair.pull()
    assert stats.nbytes == len(REMOTE) * pair.theirs.layout.block_nbytes
    assert np.array_equal(pair.ours.whole[LOCAL], pair.theirs.whole[REMOTE])
    assert not pair.ours.whole[4].any()  # asked for by nobody
    assert (pair.ledger.in_flight, pair.ledger.quarantined) == (0, 0)


@pytest.mark.parametrize(("src", "dst"), [(1, 3), (3, 1)])
async def test_heads_of_layers_stored_otherwise_arrive_too(monkeypatch, src, dst):
    """Layers of bf16 among layers of 8-bit keys and 4-bit values, seen as numbers by the engine's own views."""
    monkeypatch.setattr(ranks_module, "STAGING_NBYTES", 25_000)
    layout = KVLayout(4, 3, 32, 8, "k8v4", (1, 3))
    monkeypatch.setattr(Side, "layout_of", staticmethod(lambda _: layout))
    theirs, ours = Side(3, src, "p"), Side(3, dst, "d")
    for rank, region in enumerate(theirs.regions):
        region.blocks[:] = np.random.default_rng(rank).integers(0, 256, region.blocks.shape, np.uint8)
    lease = LeaseView(monotonic)
    lease.renewed(monotonic(), 60.0)
    puller = Puller(Ledger([].extend))
    peer = ours.ranks.connect("fake", theirs.ranks.offers()["fake"])
    await puller.pull(peer, REMOTE, LOCAL, theirs.ranks.checksums(REMOTE), lease, "r")
    for layer in range(4):
        for part in range(3):
            for want, got in zip(_runs(theirs, layer, part), _runs(ours, layer, part), strict=True):
                assert np.array_equal(got[:, LOCAL], want[:, REMOTE])
    puller.close()
    theirs.close()
    ours.close()


def _runs(side: Side, layer: int, part: int) -> list[np.ndarray]:
    """Bytes [heads, blocks, ...] of all ranks' numbers, scales or zeros of a layer, of keys and of values."""
    own, found = rank_layout(side.layout, len(side.regions)), []
    caches = [KVCache(own, 8) for _ in side.regions]
    for cache, region in zip(caches, side.regions, strict=True):
        cache.raw.copy_(torch.from_numpy(region.blocks.copy()))
    for name in ("keys", "values"):
        runs = [getattr(cache, name)(layer) for cache in caches]
        parts = [(r.numbers, r.scales, r.zeros)[part] for r in runs]
        if parts[0] is not None:
            found.append(torch.cat([p.contiguous().view(torch.uint8) for p in parts]).numpy())
    return found


async def test_equal_degrees_read_straight_into_the_pool(make_pair):
    for degree in (1, 3):
        pair = make_pair(3, degree, degree)
        assert [pool.local for pool in pair.pools] == pair.ours.regions
        assert len(list(pair.peer.reads(REMOTE, LOCAL, range(7 * degree)))) == degree


@pytest.mark.parametrize("degrees", [(3, 1, 3), (3, 3, 1), (3, 3, 3), (6, 2, 3)])
async def test_a_damaged_block_of_any_rank_is_a_miss(make_pair, degrees):
    pair = make_pair(*degrees)
    for rank, region in enumerate(pair.theirs.regions):
        sums = pair.theirs.ranks.checksums(REMOTE)
        region.block(4)[77] ^= 1
        with pytest.raises(ChecksumMismatch, match="peer's block 4"):
            await pair.pull(sums=sums)
        assert pair.ledger.in_flight == 0, rank
        region.block(4)[77] ^= 1
    assert pair.ledger.release("r", LOCAL) == LOCAL
    await pair.pull()


async def test_a_pool_that_is_a_tensor_takes_slices_too(make_pair):
    """The GPU's kind of region, over tensors of the CPU."""
    pair = make_pair(3, 1, 3)
    ours = Side(3, 3, "d", make_region=_tensor_region)
    await pair.pull(peer=ours.ranks.connect("fake", pair.offers))
    assert np.array_equal(ours.whole[LOCAL], pair.theirs.whole[REMOTE])
    ours.close()


def _tensor_region(num_blocks: int, block_nbytes: int, incarnation: str) -> Region:
    return DeviceRegion(torch.zeros((num_blocks, block_nbytes), dtype=torch.uint8), incarnation)


@pytest.mark.parametrize("degrees", [(3, 3, 1), (3, 3, 3)])
async def test_a_lease_revoked_between_ranks_is_a_miss(make_pair, degrees, set_faults):
    """1. Rank 0's blocks are in. 2. The lease ends while rank 1's are read. 3. Nothing counts."""
    pair = make_pair(*degrees)
    set_faults("transfer.verify@2=delay:0.2")
    pulling = asyncio.ensure_future(pair.pull())
    await asyncio.sleep(0.1)
    pair.lease.revoke("the stream broke")
    with pytest.raises(LeaseLost, match="the stream broke"):
        await pulling
    assert pair.ledger.in_flight == 0


@pytest.mark.parametrize("degrees", [(3, 3, 1), (3, 3, 3)])
async def test_a_rank_that_is_lost_is_a_miss(make_pair, degrees):
    pair = make_pair(*degrees)
    pair.pools[2].lost = True
    with pytest.raises(PeerLost):
        await pair.pull()
    assert pair.ledger.in_flight == 0


async def test_a_late_write_to_staging_touches_no_block(make_pair):
    """1. A read through staging runs out of time. 2. Another peer of that degree cannot use staging.
    3. The late bytes land there. 4. Both peers work again, and no block of ours was touched."""
    pair = make_pair(3, 3, 1)
    other = pair.ours.ranks.connect("fake", pair.offers)
    pair.pools[0].stuck = True
    with pytest.raises(ReadPending):
        await pair.pull()
    assert not pair.peer.drain()
    with pytest.raises(ValueError, match="still in flight"):
        pair.ledger.begin("next", LOCAL)
    with pytest.raises(SourceFailed, match="may still write the staging memory"):
        await pair.puller.pull(other, [0], [4], pair.theirs.ranks.checksums([0]), pair.lease, "other")
    pair.pools[0].stuck = False
    assert pair.ledger.release("r", LOCAL) == []
    while not pair.quiet:
        await asyncio.sleep(0.005)
    assert (sorted(pair.quiet), pair.ledger.in_flight) == (sorted(LOCAL), 0)
    assert not pair.ours.whole.any()
    await pair.pull(peer=other)
    await pair.pull()
    assert np.array_equal(pair.ours.whole[LOCAL], pair.theirs.whole[REMOTE])


async def test_announcements_need_a_checksum_per_block_and_rank(make_pair):
    pair = make_pair(3, 3, 1)
    with pytest.raises(PeerLost, match="7 blocks of 3 ranks with 7 checksums"):
        await pair.pull(sums=[0] * 7)


def test_offers_that_do_not_fit_are_refused(make_pair):
    pair = make_pair(3, 3, 1)
    connect = pair.ours.ranks.connect
    with pytest.raises(IncompatiblePeer, match="tensor_parallel_size: 1 here, 2 there"):
        connect("fake", pair.offers[:2])
    with pytest.raises(PeerLost, match="offers no rank over fake"):
        connect("fake", [])
    before = len(pair.pools)
    with pytest.raises(PeerLost, match="no peer offers"):
        connect("fake", [*pair.offers[:2], b"nobody"])
    assert [pool.closed for pool in pair.pools[before:]] == [True, True]


@pytest.mark.parametrize("transport", ["shm", "nixl", "collective"])
async def test_three_ranks_of_another_process(start_owner, transport):
    """1. P has three ranks, D first three, then one. 2. A block of P's rank 1 is re-used: a miss.
    3. With the checksum that P would announce now, D gets it."""
    nbytes = rank_layout(Side.layout_of(3), 3).block_nbytes
    owner = start_owner(transport, "p/0 p/1 p/2", 8, nbytes)
    random = [np.random.default_rng(rank).integers(0, 256, (8, nbytes), np.uint8) for rank in range(3)]
    theirs = np.stack(random).reshape(3, 8, 4, -1)
    theirs[1, 2] = 0x5A
    before = [owner.checksums[8 * rank + i] for rank in range(3) for i in REMOTE]
    after = list(before)
    after[7 + REMOTE.index(2)] = checksum(b"\x5a" * nbytes)
    owner.fill(2, 0x5A, rank=1)

    ledger = Ledger([].extend)
    puller = Puller(ledger)
    lease = LeaseView(monotonic)
    lease.renewed(monotonic(), 60.0)
    for degree in (3, 1):
        ours = Side(
            3, degree, "d", make=lambda region: make_transport(transport, region, "d"), name=transport
        )
        peer = await asyncio.to_thread(ours.ranks.connect, transport, owner.offers)
        with pytest.raises(ChecksumMismatch, match="peer's block 2"):
            await puller.pull(peer, REMOTE, LOCAL, before, lease, "r")
        await puller.pull(peer, REMOTE, LOCAL, after, lease, "r")
        assert np.array_equal(ours.whole[LOCAL], theirs.transpose(1, 2, 0, 3)[REMOTE])
        assert ledger.in_flight == 0
        peer.close()
        ours.close()
    await asyncio.to_thread(puller.close)
