"""The owner of a region in a process of its own: offers it, then obeys one command a line.

usage: kv_owner.py TRANSPORT NUM_BLOCKS BLOCK_NBYTES INCARNATION
stdout: one JSON line {offer (hex), checksums}. stdin: `fill BLOCK VALUE`; the end of input ends it.
"""

import json
import sys

import numpy as np

from kvtransfer.checksum import checksum
from kvtransfer.nixl_transport import NixlTransport
from kvtransfer.region import Region
from kvtransfer.shm_transport import ShmTransport


def main() -> None:
    name, num_blocks, block_nbytes, incarnation = sys.argv[1:]
    region = Region.create(int(num_blocks), int(block_nbytes), incarnation)
    region.blocks[:] = np.random.default_rng(0).integers(0, 256, region.blocks.shape, np.uint8)
    transport = ShmTransport(region) if name == "shm" else NixlTransport(region, "owner")
    sums = [checksum(region.block(i)) for i in range(region.num_blocks)]
    print(json.dumps({"offer": transport.offer().hex(), "checksums": sums}), flush=True)
    for line in sys.stdin:
        _, block, value = line.split()
        region.blocks[int(block)] = int(value)
        print("done", flush=True)


if __name__ == "__main__":
    main()
