"""The owner of a region per rank, in a process of its own: offers them, then obeys one command a line.

usage: kv_owner.py TRANSPORT NUM_BLOCKS BLOCK_NBYTES INCARNATION...
One rank for each incarnation of a region; rank r's blocks hold random bytes of seed r.
stdout: one JSON line {offers (hex), checksums}. stdin: `fill RANK BLOCK VALUE`; the end of input ends it.
"""

import json
import sys

import numpy as np

from core import log
from kvtransfer.checksum import checksum
from kvtransfer.collective_transport import CollectiveTransport
from kvtransfer.nixl_transport import NixlTransport
from kvtransfer.region import Region
from kvtransfer.shm_transport import ShmTransport
from kvtransfer.transport import Transport


def make_transport(name: str, region: Region, worker_id: str) -> Transport:
    if name == "shm":
        return ShmTransport(region)
    if name == "nixl":
        return NixlTransport(region, worker_id)
    return CollectiveTransport(region, "127.0.0.1", "127.0.0.1")


def main() -> None:
    log.configure("warning")  # stdout is for answers
    name, num_blocks, block_nbytes, *incarnations = sys.argv[1:]
    regions = [Region.create(int(num_blocks), int(block_nbytes), each) for each in incarnations]
    for seed, region in enumerate(regions):
        region.blocks[:] = np.random.default_rng(seed).integers(0, 256, region.blocks.shape, np.uint8)
    transports = [make_transport(name, region, "owner") for region in regions]
    sums = [checksum(region.block(i)) for region in regions for i in range(region.num_blocks)]
    offers = [transport.offer().hex() for transport in transports]
    print(json.dumps({"offers": offers, "checksums": sums}), flush=True)
    for line in sys.stdin:
        _, rank, block, value = line.split()
        regions[int(rank)].blocks[int(block)] = int(value)
        print("done", flush=True)


if __name__ == "__main__":
    main()
