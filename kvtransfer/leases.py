"""Leases: how long a prefill worker keeps blocks for a decode worker, seen from both sides.

The producer's `LeaseTable` decides. The consumer's `LeaseView` knows less and is therefore stricter:
it counts from the moment D *sent* its request, P from the moment it received it, so D's deadline
always comes first and no clock is ever compared with another process's.

    D   sent |<----------- lease_s ----------->| D stops trusting
    P        ... received |<----------- lease_s ----------->| P frees

A lease is one try (`epoch`) of one transfer: a newer epoch voids the older.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.clock import Clock, monotonic
from core.errors import LeaseLost, Overloaded

_RENEW_AFTER = 1 / 3  # of a lease; leaves two more tries before it ends


@dataclass(slots=True)
class _Lease:
    epoch: int
    lease_s: float
    deadline: float


class LeaseTable:
    """The producer's leases; at most `limit` at a time. Pure: the caller looks at `expired` in time."""

    def __init__(self, clock: Clock = monotonic, limit: int = 1024) -> None:
        self._clock = clock
        self._limit = limit
        self._leases: dict[str, _Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, transfer_id: str, epoch: int, lease_s: float) -> None:
        """Begin a lease. The caller ends the job of an older epoch of the same transfer.

        Raises LeaseLost when this or a newer epoch is already held, Overloaded above the limit.
        """
        held = self._leases.get(transfer_id)
        if held is not None and held.epoch >= epoch:
            raise LeaseLost(f"transfer {transfer_id} is held for epoch {held.epoch}, {epoch} is void")
        if held is None and len(self._leases) >= self._limit:
            raise Overloaded(f"{self._limit} transfers wait to be pulled here; try again later")
        self._leases[transfer_id] = _Lease(epoch, lease_s, self._clock() + lease_s)

    def renew(self, transfer_id: str, epoch: int) -> float:
        """Start the lease anew; returns its remaining time in seconds.

        Raises LeaseLost when it is unknown, expired or of another epoch.
        """
        lease, now = self._leases.get(transfer_id), self._clock()
        if lease is None:
            raise LeaseLost(f"transfer {transfer_id} is not held here: released, expired or never begun")
        if lease.epoch != epoch:
            raise LeaseLost(f"transfer {transfer_id} is held for epoch {lease.epoch}, not {epoch}")
        if now >= lease.deadline:
            raise LeaseLost(f"the lease of transfer {transfer_id} ended {now - lease.deadline:.3f} s ago")
        lease.deadline = now + lease.lease_s
        return lease.lease_s

    def release(self, transfer_id: str, epoch: int) -> bool:
        """End a lease; True when this call did. Idempotent; another epoch changes nothing."""
        lease = self._leases.get(transfer_id)
        if lease is None or lease.epoch != epoch:
            return False
        del self._leases[transfer_id]
        return True

    def expired(self) -> list[str]:
        """Transfers whose lease ran out since the last call; they are forgotten here."""
        now = self._clock()
        gone = [name for name, lease in self._leases.items() if now >= lease.deadline]
        for name in gone:
            del self._leases[name]
        return gone


class LeaseView:
    """The consumer's view of one lease. Written by one thread; `check` may be called from another."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._sent_at = 0.0
        self._deadline: float | None = None
        self._revoked = ""

    def renewed(self, sent_at: float, lease_s: float) -> None:
        """The producer granted or renewed; `sent_at`: our clock when the request for it was sent.

        A reply that was overtaken by a later one changes nothing.
        """
        if self._deadline is None or sent_at + lease_s > self._deadline:
            self._sent_at, self._deadline = sent_at, sent_at + lease_s

    def revoke(self, reason: str) -> None:
        """The lease is over for good (stream broken, released, aborted). The first reason stays."""
        self._revoked = self._revoked or reason or "revoked"

    def check(self) -> None:
        """Raises LeaseLost unless the producer surely still keeps the blocks."""
        if self._revoked:
            raise LeaseLost(f"the lease ended: {self._revoked}")
        if self._deadline is None:
            raise LeaseLost("the lease was not granted yet")
        late = self._clock() - self._deadline
        if late >= 0:
            raise LeaseLost(f"the lease ran out {late:.3f} s ago without a renewal")

    def remaining(self) -> float:
        """Seconds until the deadline; 0 when the lease is over or was never granted."""
        if self._revoked or self._deadline is None:
            return 0.0
        return max(0.0, self._deadline - self._clock())

    def renew_due(self) -> float:
        """Seconds until a renewal should be sent, a third of the lease after the last one; 0 = now."""
        if self._deadline is None:
            return 0.0
        due = self._sent_at + (self._deadline - self._sent_at) * _RENEW_AFTER
        return max(0.0, due - self._clock())
