"""A worker that stores blocks on disk without end, until it is killed.

usage: kv_disk_writer.py DIRECTORY CAPACITY_NBYTES
"""

import asyncio
import sys
from itertools import count
from pathlib import Path

from tier_blocks import BLOCK_NBYTES, NAMESPACE, blocks

from core import log
from kvtransfer.disk_files import BlockFiles
from kvtransfer.disk_tier import DiskTier


async def main() -> None:
    log.configure("warning")
    files = BlockFiles(Path(sys.argv[1]), NAMESPACE, BLOCK_NBYTES)
    tier = DiskTier(files, int(sys.argv[2]), stall_s=5.0)
    assert await tier.opened()
    for seed in count():
        assert await tier.store(blocks(16, seed)) == 16
        print(seed, flush=True)


asyncio.run(main())
