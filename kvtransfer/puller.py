"""The verified pull: read on the one transfer thread, then lease, then checksums.

    event loop                          transfer thread, for each read that the peer's ranks take
    ----------                          ---------------
    pull: ledger.begin, queue  ----->   lease.check           still worth reading?
                                        fault transfer.read
                                        pool.read
                                        fault transfer.verify
                                        lease.check           were the blocks ours until the end?
    ledger.end, result         <-----   checksum of our bytes are they what was announced?

The order matters: a READ of re-used memory succeeds silently. Whoever awaits `pull` may be cancelled;
the read goes on, and its operation in the ledger ends only when it really ended.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from core import faults
from core.clock import Clock, monotonic
from core.errors import ChecksumMismatch, PeerLost, SourceFailed
from core.log import get
from kvtransfer.checksum import checksum
from kvtransfer.leases import LeaseView
from kvtransfer.ledger import Ledger, Operation
from kvtransfer.peer_ranks import PeerRanks, Read
from kvtransfer.transport import ReadPending

_DRAIN_POLL_S = 0.01

log = get("kvtransfer")


@dataclass(frozen=True, slots=True)
class PullStats:
    """`seconds`: reading and verifying, without the wait for the transfer thread."""

    nbytes: int
    seconds: float


@dataclass(slots=True, eq=False)
class _Pull:
    peer: PeerRanks
    remote_ids: Sequence[int]
    local_ids: Sequence[int]
    checksums: Sequence[int]
    lease: LeaseView
    operation: Operation
    result: asyncio.Future[PullStats]


class Puller:
    """Owns the transfer thread of one worker; at most `limit` pulls wait or run at a time.

    `timeout_s` bounds all reads of one pull together. All methods are called on the event loop.
    """

    def __init__(
        self,
        ledger: Ledger,
        clock: Clock = monotonic,
        timeout_s: float = 5.0,
        limit: int = 256,
    ) -> None:
        self._ledger = ledger
        self._clock = clock
        self._timeout_s = timeout_s
        self._limit = limit
        self._closing = False
        self._unfinished = 0
        self._queue: queue.SimpleQueue[_Pull | PeerRanks | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)
        self._thread.start()

    async def pull(
        self,
        peer: PeerRanks,
        remote_ids: Sequence[int],
        local_ids: Sequence[int],
        checksums: Sequence[int],
        lease: LeaseView,
        owner: str,
    ) -> PullStats:
        """Fill `local_ids` of all our ranks with the peer's `remote_ids`; on return they are verified.

        `checksums`: of the blocks in the peer's rank 0, then in its rank 1, and so on.
        Raises LeaseLost, ChecksumMismatch, PeerLost (ReadPending: the blocks are not quiet yet), or
        plain SourceFailed when the queue is full. The blocks' content is undefined after an error;
        give them up through the ledger, never directly.
        """
        if self._closing:
            raise PeerLost("this worker is shutting down and pulls no more blocks")
        if len(checksums) != len(remote_ids) * peer.num_ranks:
            raise PeerLost(
                f"the peer announced {len(remote_ids)} blocks of {peer.num_ranks} ranks "
                f"with {len(checksums)} checksums"
            )
        if len(local_ids) != len(remote_ids):
            raise PeerLost(f"{len(remote_ids)} blocks of the peer cannot fill {len(local_ids)} of ours")
        if self._unfinished >= self._limit:
            raise SourceFailed(f"{self._limit} pulls are waiting already; the blocks are made here instead")
        result: asyncio.Future[PullStats] = asyncio.get_running_loop().create_future()
        operation = self._ledger.begin(owner, local_ids)
        self._unfinished += 1
        self._queue.put(_Pull(peer, remote_ids, local_ids, checksums, lease, operation, result))
        return await result

    def retire(self, peer: PeerRanks) -> None:
        """Close a peer on the transfer thread: behind the reads that are queued, once it is quiet."""
        if self._thread.is_alive():
            self._queue.put(peer)
        else:
            peer.close()

    def stop(self) -> None:
        """Take no more pulls; the thread ends after the running read, queued pulls fail. Idempotent."""
        if not self._closing:
            self._closing = True
            self._queue.put(None)

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop and wait for the thread, at most `timeout_s`. Off the loop only after `stop` on it."""
        self.stop()
        self._thread.join(timeout_s)

    # Transfer thread.

    def _run(self) -> None:
        draining: list[_Pull] = []
        retiring: list[PeerRanks] = []
        while True:
            try:
                task = self._queue.get(timeout=_DRAIN_POLL_S if draining or retiring else None)
            except queue.Empty:
                pass
            else:
                if task is None:
                    break
                if not isinstance(task, _Pull):
                    retiring.append(task)
                elif not self._serve(task):
                    draining.append(task)
            for pull in [pull for pull in draining if pull.peer.drain()]:
                draining.remove(pull)
                self._post(pull, self._ledger.end, pull.operation)
            for peer in [peer for peer in retiring if peer.drain()]:
                retiring.remove(peer)
                peer.close()
        self._leave(retiring)

    def _leave(self, retiring: list[PeerRanks]) -> None:
        """No pull can be queued behind the end, but peers can."""
        while not self._queue.empty():
            task = self._queue.get()
            if task is not None and not isinstance(task, _Pull):
                retiring.append(task)
        for peer in retiring:
            peer.close()

    def _serve(self, pull: _Pull) -> bool:
        """Run one pull and report its outcome; False when its blocks are not quiet yet."""
        quiet = True
        try:
            outcome: PullStats | Exception = self._read_and_verify(pull)
        except ReadPending as error:
            outcome, quiet = error, False
        except faults.InjectedFault as error:
            outcome = PeerLost(str(error))
        except Exception as error:
            outcome = error
        self._post(pull, self._finish, pull, outcome, quiet)
        return quiet

    def _read_and_verify(self, pull: _Pull) -> PullStats:
        if self._closing:
            raise PeerLost("this worker is shutting down; the pull was not begun")
        if pull.result.cancelled():
            raise PeerLost("nobody waits for this pull any more")
        started, nbytes = self._clock(), 0
        deadline = started + self._timeout_s
        for read in pull.peer.reads(pull.remote_ids, pull.local_ids, pull.checksums):
            pull.lease.check()
            faults.hit("transfer.read")
            read.pool.read(read.remote_ids, read.local_ids, max(0.0, deadline - self._clock()))
            faults.hit("transfer.verify")
            pull.lease.check()
            nbytes += _verify(read)
        return PullStats(nbytes, self._clock() - started)

    def _post(self, pull: _Pull, callback: Callable[..., None], *args: object) -> None:
        try:
            pull.result.get_loop().call_soon_threadsafe(callback, *args)
        except RuntimeError:
            log.debug("pull.unreported", reason="the event loop is closed: the process is leaving")

    # Event loop again.

    def _finish(self, pull: _Pull, outcome: PullStats | Exception, quiet: bool) -> None:
        self._unfinished -= 1
        if quiet:
            self._ledger.end(pull.operation)
        if pull.result.done():
            return
        if isinstance(outcome, PullStats):
            pull.result.set_result(outcome)
        else:
            pull.result.set_exception(outcome)


def _verify(read: Read) -> int:
    """Bytes that were read. Raises ChecksumMismatch."""
    ours = read.pool.local
    for remote, local, expected in zip(read.remote_ids, read.local_ids, read.checksums, strict=True):
        if checksum(ours.block(local)) != expected:
            raise ChecksumMismatch(
                f"the bytes read from the peer's block {remote} are not those announced: "
                "it was re-used, or damaged on the way"
            )
    return len(read.local_ids) * ours.block_nbytes
