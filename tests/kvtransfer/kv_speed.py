"""Speed of pulls between two processes: 128 scattered blocks of 720 KiB (2,048 tokens of the embedded
model in fp32).

usage: PYTHONPATH=. python tests/kvtransfer/kv_speed.py [ROUNDS]
"""

import asyncio
import sys
import time
from collections.abc import Callable

from conftest import Owner

from core.clock import monotonic
from kvtransfer.checksum import checksum
from kvtransfer.leases import LeaseView
from kvtransfer.ledger import Ledger
from kvtransfer.nixl_transport import NixlTransport
from kvtransfer.puller import Puller
from kvtransfer.region import Region
from kvtransfer.shm_transport import ShmTransport
from kvtransfer.transport import Transport

BLOCK_NBYTES = 720 * 1024
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


async def pulls(transport: Transport, owner: Owner, rounds: int) -> list[float]:
    puller = Puller(Ledger(lambda block_ids: None))
    pool = transport.connect(owner.offer)
    sums = [owner.checksums[i] for i in REMOTE]
    seconds = []
    for _ in range(rounds):
        lease = LeaseView(monotonic)
        lease.renewed(monotonic(), 60.0)
        started = time.perf_counter()
        await puller.pull(pool, REMOTE, LOCAL, sums, lease, "bench")
        seconds.append(time.perf_counter() - started)
    puller.retire(pool)
    puller.close()
    return seconds


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    for name in ("shm", "nixl"):
        region = Region.create(COUNT, BLOCK_NBYTES, "bench")
        region.blocks[:] = 0  # page faults are not what is measured
        transport: Transport = ShmTransport(region) if name == "shm" else NixlTransport(region, "bench")
        owner = Owner(name, "bench", 2 * COUNT, BLOCK_NBYTES)
        started = time.perf_counter()
        transport.offer()
        print(f"{name}: transport ready in {time.perf_counter() - started:.3f} s")
        started = time.perf_counter()
        pool = transport.connect(owner.offer)
        print(f"{name}: connected in {(time.perf_counter() - started) * 1e3:.1f} ms")
        measure(f"{name} read", rounds, lambda pool=pool: pool.read(REMOTE, LOCAL, 10.0))
        pool.close()
        report(f"{name} pull (read, lease, checksums)", asyncio.run(pulls(transport, owner, rounds)))
        measure("checksums alone", rounds, lambda region=region: [checksum(region.block(i)) for i in LOCAL])
        transport.close()
        owner.close()
        region.close()


if __name__ == "__main__":
    main()
