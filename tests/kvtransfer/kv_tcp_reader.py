"""A reader over UCX's TCP, where reads are asynchronous; prints one JSON object of what happened.

usage: kv_tcp_reader.py OFFER_HEX OWNER_PID. The owner is stopped, so the first read cannot end.
"""

import asyncio
import json
import os
import signal
import sys

from core.errors import PeerLost
from kvtransfer.checksum import checksum
from kvtransfer.leases import LeaseView
from kvtransfer.ledger import Ledger
from kvtransfer.nixl_transport import NixlTransport
from kvtransfer.peer_ranks import DirectRanks
from kvtransfer.puller import Puller
from kvtransfer.region import Region
from kvtransfer.transport import ReadPending

BLOCKS = list(range(8))


async def main(offer: bytes, owner: int) -> None:
    said: dict[str, object] = {}
    region = Region.create(8, 2**20, "reader")
    transport = NixlTransport(region, "reader")
    quiet: list[int] = []
    freed = asyncio.Event()
    ledger = Ledger(lambda block_ids: (quiet.extend(block_ids), freed.set()))
    puller = Puller(ledger, timeout_s=0.5)
    lease = LeaseView()
    lease.renewed(asyncio.get_running_loop().time(), 60.0)
    peer = DirectRanks([transport.connect(offer)])

    async def pull() -> object:
        try:
            await puller.pull(peer, BLOCKS, BLOCKS, [0] * 8, lease, "r")
        except PeerLost as error:
            return error
        except Exception as error:
            return type(error).__name__

    said["warm"] = await pull()
    region.blocks[:] = 0
    os.kill(owner, signal.SIGSTOP)
    said["pending"] = isinstance(await pull(), ReadPending)
    said["refused_while_pending"] = "still in flight" in str(await pull())
    said["released"] = ledger.release("r", BLOCKS)
    puller.retire(peer)
    try:
        transport.connect(offer)
    except PeerLost as error:
        said["reconnect"] = "still in flight" in error.message
    await asyncio.sleep(0.3)
    said["quiet_while_stopped"] = list(quiet)
    before = [checksum(region.block(i)) for i in BLOCKS]
    os.kill(owner, signal.SIGCONT)
    await asyncio.wait_for(freed.wait(), 5)
    said["quiet"] = quiet
    after = [checksum(region.block(i)) for i in BLOCKS]
    await asyncio.sleep(0.3)
    said["written_once_quiet"] = [checksum(region.block(i)) for i in BLOCKS] != after
    said["written_late"] = before != after
    transport.connect(offer).read([0], [1], 5.0)
    said["reconnected"] = checksum(region.block(0)) == checksum(region.block(1))
    puller.close()
    print(json.dumps(said))


asyncio.run(main(bytes.fromhex(sys.argv[1]), int(sys.argv[2])))
