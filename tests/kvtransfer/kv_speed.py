"""Speed of pulls between two processes: 128 scattered blocks of 720 KiB (2,048 tokens of the embedded
model in fp32). A pull is read, lease, checksums, and head slices where the degrees differ.

usage: PYTHONPATH=. python tests/kvtransfer/kv_speed.py [ROUNDS]
"""

import asyncio
import sys
import time
from collections.abc import Callable

from conftest import Owner
from kv_owner import make_transport

from core.clock import monotonic
from core.kv import KVLayout
from engine.kernels.torch_kernels import TorchKernels
from kvtransfer.checksum import checksum
from kvtransfer.leases import LeaseView
from kvtransfer.ledger import Ledger
from kvtransfer.puller import Puller
from kvtransfer.ranks import Ranks
from kvtransfer.region import Region
from kvtransfer.slices import rank_layout

LAYOUT = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, kv_dtype="fp32")
BLOCK_NBYTES = LAYOUT.block_nbytes
COUNT = 128
REMOTE = [2 * i for i in range(COUNT)]
LOCAL = [(7 * i) % COUNT for i in range(COUNT)]


def report(what: str, seconds: list[float]) -> None:
    best, median = min(seconds), sorted(seconds)[len(seconds) // 2]
    nbytes = COUNT * BLOCK_NBYTES
    print(
        f"{what:36s} first {seconds[0] * 1e3:6.1f} ms   median {median * 1e3:6.1f} ms "
        f"{nbytes / median / 1e9:5.1f} GB/s   best {nbytes / best / 1e9:5.1f} GB/s"
    )


def measure(what: str, rounds: int, call: Callable[[], None]) -> None:
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    report(what, seconds)


async def pulls(name: str, src: int, dst: int, rounds: int) -> list[float]:
    """Seconds of each pull from a peer of `src` ranks into `dst` ranks."""
    nbytes = rank_layout(LAYOUT, dst).block_nbytes
    regions = [Region.create(COUNT, nbytes, f"bench-d/{rank}") for rank in range(dst)]
    for region in regions:
        region.blocks[:] = 0
    ranks = Ranks(
        LAYOUT, regions, {name: lambda region: make_transport(name, region, "bench")}, TorchKernels()
    )
    lives = " ".join(f"bench-p/{rank}" for rank in range(src))
    owner = Owner(name, lives, 2 * COUNT, rank_layout(LAYOUT, src).block_nbytes)
    sums = [owner.checksums[2 * COUNT * rank + i] for rank in range(src) for i in REMOTE]
    peer = ranks.connect(name, owner.offers)
    puller = Puller(Ledger(lambda block_ids: None))
    seconds = []
    for _ in range(rounds):
        lease = LeaseView(monotonic)
        lease.renewed(monotonic(), 60.0)
        started = time.perf_counter()
        await puller.pull(peer, REMOTE, LOCAL, sums, lease, "bench")
        seconds.append(time.perf_counter() - started)
    puller.retire(peer)
    puller.stop()
    await asyncio.to_thread(puller.close)
    ranks.close()
    owner.close()
    for region in regions:
        region.close()
    return seconds


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    for name in ("shm", "nixl", "collective"):
        region = Region.create(COUNT, BLOCK_NBYTES, "bench")
        region.blocks[:] = 0  # page faults are not what is measured
        transport = make_transport(name, region, "bench")
        owner = Owner(name, "bench", 2 * COUNT, BLOCK_NBYTES)
        started = time.perf_counter()
        transport.offer()
        print(f"{name}: transport ready in {time.perf_counter() - started:.3f} s")
        started = time.perf_counter()
        pool = transport.connect(owner.offer)
        print(f"{name}: connected in {(time.perf_counter() - started) * 1e3:.1f} ms")
        measure(f"{name} read", rounds, lambda pool=pool: pool.read(REMOTE, LOCAL, 10.0))
        pool.close()
        measure("checksums alone", rounds, lambda region=region: [checksum(region.block(i)) for i in LOCAL])
        transport.close()
        owner.close()
        region.close()
        for src, dst in ((1, 1), (3, 3), (1, 3), (3, 1)):
            report(f"{name} pull, {src} -> {dst} ranks", asyncio.run(pulls(name, src, dst, rounds)))


if __name__ == "__main__":
    main()
