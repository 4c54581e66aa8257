"""The records of requests that run and of the last ones that are over, for `/v1/requests`.

What is over is kept as the bytes of its JSON: so its size is known, and ten thousand of them are nothing that
the garbage collector has to walk.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import orjson

from services.router.record import Record
from services.router.record_json import describe
from services.router.record_summary import RequestSummary, summarize

MAX_RECORDS = 10_000
DEFAULT_LISTED, MAX_LISTED = 20, 200
ENTRY_NBYTES = 600
"""What an entry takes beside its JSON: ids, key, their places in the two tables."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """`json`: of its RequestRecord; `summary`: of its RequestSummary."""

    client_request_id: str
    key: str
    json: bytes
    summary: bytes

    @property
    def nbytes(self) -> int:
        return len(self.json) + len(self.summary) + ENTRY_NBYTES


class Records:
    """`began` and `ended` once for each request; at most `limit_nbytes` and MAX_RECORDS of those that are
    over.

    A key sees its own requests only: `key` is the name of the one that asks, None sees all.
    """

    def __init__(self, limit_nbytes: int) -> None:
        self._limit_nbytes = limit_nbytes
        self.nbytes = 0
        self._running: dict[str, Record] = {}
        self._over: OrderedDict[str, _Entry] = OrderedDict()
        self._by_client: dict[tuple[str, str], str] = {}  # the newest request of a key's own id

    def began(self, record: Record) -> None:
        self._running[record.request_id] = record
        by_client = record.key, record.client_request_id
        self._by_client.pop(by_client, None)  # so that the newest stands last
        self._by_client[by_client] = record.request_id

    def ended(self, record: Record) -> None:
        """Keep what is known now. Idempotent."""
        if self._running.pop(record.request_id, None) is None:
            return
        json, summary = orjson.dumps(describe(record)), orjson.dumps(summarize(record))
        entry = _Entry(record.client_request_id, record.key, json, summary)
        self._over[record.request_id] = entry
        self.nbytes += entry.nbytes
        while self.nbytes > self._limit_nbytes or len(self._over) > MAX_RECORDS:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        request_id, entry = self._over.popitem(last=False)
        self.nbytes -= entry.nbytes
        by_client = entry.key, entry.client_request_id
        if self._by_client.get(by_client) == request_id:
            del self._by_client[by_client]

    def find(self, name: str, key: str | None) -> bytes | None:
        """The JSON of a request by our id, an answer's id (`cmpl-...`) or its client's id, the newest that
        has it; None when it is gone, was never here or is another key's."""
        request_id = self._by_client_id(name, key) or name.removeprefix("chat").removeprefix("cmpl-")
        record, entry = self._running.get(request_id), self._over.get(request_id)
        if record is not None and key in (None, record.key):
            return orjson.dumps(describe(record))
        return entry.json if entry is not None and key in (None, entry.key) else None

    def _by_client_id(self, name: str, key: str | None) -> str | None:
        if key is not None:
            return self._by_client.get((key, name))
        every = reversed(self._by_client.items())
        return next((request_id for (_, theirs), request_id in every if theirs == name), None)

    def newest(self, limit: int, key: str | None) -> bytes:
        """The JSON of a RequestList, of at most `limit`."""
        return orjson.dumps({"object": "list", "data": list(islice(self._mine(key), limit))})

    def _mine(self, key: str | None) -> Iterator[RequestSummary | orjson.Fragment]:
        for record in reversed(self._running.values()):
            if key in (None, record.key):
                yield summarize(record)
        for entry in reversed(self._over.values()):
            if key in (None, entry.key):
                yield orjson.Fragment(entry.summary)

    @property
    def running(self) -> int:
        return len(self._running)

    def __len__(self) -> int:
        """Of those that are over."""
        return len(self._over)
