"""Pain C7: workers that are configured differently never exchange blocks."""

import asyncio
from dataclasses import fields, replace

import pytest

from core.errors import IncompatiblePeer, PeerLost
from core.kv import Fingerprint
from kvtransfer.handshake import PeerBook, check

OURS = Fingerprint(
    model_digest="aa",
    tokenizer_digest="bb",
    num_layers=30,
    num_kv_heads=3,
    head_dim=64,
    block_size=16,
    kv_dtype="fp32",
    rope="llama theta=100000",
    max_model_len=8192,
)


def test_equal_fingerprints_pair():
    check(OURS, replace(OURS))


@pytest.mark.parametrize("name", [field.name for field in fields(Fingerprint)])
def test_each_field_alone_is_refused_by_name(name):
    ours = getattr(OURS, name)
    theirs = ours + 1 if isinstance(ours, int) else ours + "x"
    with pytest.raises(
        IncompatiblePeer, match=f"differ in {name}: {ours!r} here, {theirs!r} there"
    ) as caught:
        check(OURS, replace(OURS, **{name: theirs}))
    assert caught.value.field == name


class Pool:
    """Only its identity matters here."""


class Book:
    def __init__(self, limit: int = 8) -> None:
        self.retired: list[object] = []
        self.book = PeerBook(self.retired.append, limit)
        self.connects = 0

    async def get(self, worker_id: str, incarnation: str, error: Exception | None = None):
        async def connect():
            self.connects += 1
            await asyncio.sleep(0)
            if error:
                raise error
            return Pool()

        return await self.book.get(worker_id, incarnation, connect)


async def test_a_peer_is_connected_once_for_all_who_wait():
    book = Book()
    pools = await asyncio.gather(*(book.get("p", "1") for _ in range(5)))
    assert len(set(map(id, pools))) == book.connects == 1
    assert await book.get("p", "1") is pools[0]


async def test_a_failed_connect_is_not_remembered():
    book = Book()
    failed = await asyncio.gather(
        *(book.get("p", "1", PeerLost("gone")) for _ in range(2)), return_exceptions=True
    )
    assert [type(error) for error in failed] == [PeerLost, PeerLost]
    assert len(book.book) == 0
    assert await book.get("p", "1")
    assert book.connects == 2


async def test_a_new_incarnation_retires_the_old_one_of_that_worker_only():
    book = Book()
    old, other = await book.get("p", "1"), await book.get("q", "1")
    await book.get("p", "2")
    assert book.retired == [old]
    assert await book.get("q", "1") is other


async def test_a_stale_request_for_an_older_life_does_not_retire_the_new_one():
    book = Book()
    new = await book.get("p", "2")
    with pytest.raises(PeerLost):
        await book.get("p", "1", PeerLost("restarted"))
    assert await book.get("p", "2") is new
    assert book.retired == []


async def test_the_book_is_bounded_and_drops_the_least_recently_used():
    book = Book(limit=2)
    a, b = await book.get("a", "1"), await book.get("b", "1")
    await book.get("a", "1")
    await book.get("c", "1")
    assert book.retired == [b]
    assert await book.get("a", "1") is a


async def test_a_discarded_peer_is_connected_again():
    book = Book()
    lost = await book.get("p", "1")
    book.book.discard("p", "1")
    book.book.discard("p", "1")
    assert book.retired == [lost]
    assert await book.get("p", "1") is not lost


async def test_a_peer_dropped_while_connecting_is_retired_when_it_arrives():
    book = Book()
    waiting = asyncio.ensure_future(book.get("p", "1"))
    await asyncio.sleep(0)
    book.book.close()
    with pytest.raises(PeerLost, match="dropped"):
        await waiting
    assert len(book.retired) == 1


async def test_a_cancelled_waiter_leaves_the_connection_to_the_others():
    book = Book()
    first = asyncio.ensure_future(book.get("p", "1"))
    second = asyncio.ensure_future(book.get("p", "1"))
    await asyncio.sleep(0)
    first.cancel()
    assert await second is await book.get("p", "1")
    assert book.connects == 1
