"""What prefill jobs do and requests do not: tell the peer which blocks stand, and keep them for it."""

from __future__ import annotations

from engine.books import Books
from engine.messages import BlocksBuilt, Event
from engine.sequence import Sequence


def start_job(job: Sequence, books: Books, block_size: int, now: float) -> list[Event]:
    """Its blocks are reserved: it runs, or is held at once when none is left to compute."""
    if job.num_to_compute:
        books.run(job)
    else:
        books.hold(job)
    return publish(job, block_size, now, cached=True)


def publish(job: Sequence, block_size: int, now: float, *, cached: bool) -> list[Event]:
    """The full blocks that nobody was told of yet; `cached`: they were found or loaded, not computed."""
    first, until = job.num_published, job.num_computed // block_size
    if until == first:
        return []
    job.num_published = until
    queue_s = (job.first_scheduled_s or now) - job.arrived_s
    return [BlocksBuilt(job.seq_id, first, tuple(job.block_table[first:until]), now, cached, queue_s)]
