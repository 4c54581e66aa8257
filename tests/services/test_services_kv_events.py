"""What a worker reports of its blocks is what a router knows, through gaps, repeats and lags."""

from __future__ import annotations

import random

from core.blocks import block_key
from planning.prefix_index import Changes, PrefixIndex
from services.worker.kv_events import KVEventLog
from wire.v1 import worker_pb2 as pb


def name(i: int) -> bytes:
    return i.to_bytes(32, "little")


def keys(*numbers: int) -> list[int]:
    return [block_key(name(i)) for i in numbers]


def take(index: PrefixIndex, events: pb.KvEvents | None) -> bool:
    if events is None:
        return True
    changes = [Changes(t.tier, t.stored, t.evicted) for t in events.tiers]
    return index.apply("w", events.first, events.next, events.snapshot, changes)


def test_a_block_that_leaves_the_device_stays_known_below() -> None:
    log, index = KVEventLog(), PrefixIndex()
    log.report("device", stored=[name(1), name(2), name(3)])
    log.report("host", stored=[name(1), name(2)])
    events, cursor = log.since(None)
    assert take(index, events)
    assert index.leading("w", keys(1, 2, 3, 4)) == {"device": 3}
    log.report("device", evicted=[name(2), name(3)])
    events, cursor = log.since(cursor)
    assert take(index, events)
    assert index.leading("w", keys(1, 2, 3)) == {"device": 1, "host": 1}
    log.report("device", stored=[name(9)], evicted=[name(9)])
    log.report("host", stored=[name(1)])
    events, _ = log.since(cursor)
    assert take(index, events)
    assert index.leading("w", keys(9)) == {"device": 1}, "evicted first, stored again"
    assert index.leading("w", keys(7, 1)) == {}, "a chain begins at its head"


def test_repeats_change_nothing_and_a_gap_asks_for_a_snapshot() -> None:
    log, index = KVEventLog(), PrefixIndex()
    snapshot, cursor = log.since(None)
    assert take(index, snapshot)
    log.report("device", stored=[name(1)])
    first, after = log.since(cursor)
    log.report("device", evicted=[name(1)], stored=[name(2)])
    second, _ = log.since(after)
    assert not take(index, second), "the first is missing"
    assert index.num_blocks("w") == 0
    fresh, _ = log.since(None)
    assert take(index, fresh)
    assert take(index, first), "old news"
    assert index.leading("w", keys(2)) == {"device": 1}
    assert index.leading("w", keys(1)) == {}


def test_random_changes_seen_by_watchers_that_lag() -> None:
    rng, log = random.Random(5), KVEventLog(limit=50)
    truth: dict[str, set[int]] = {"device": set(), "host": set()}
    watchers = [(PrefixIndex(), None, rate) for rate in (1.0, 0.3, 0.02)]
    for _ in range(2000):
        tier, i = rng.choice(("device", "host")), rng.randrange(40)
        if rng.random() < 0.5:
            log.report(tier, stored=[name(i)])
            truth[tier].add(i)
        else:
            log.report(tier, evicted=[name(i)])
            truth[tier].discard(i)
        for at, (index, cursor, rate) in enumerate(watchers):
            if rng.random() < rate:
                events, cursor = log.since(cursor)
                assert take(index, events)
                watchers[at] = (index, cursor, rate)
    for index, cursor, _ in watchers:
        assert take(index, log.since(cursor)[0])
        for i in range(40):
            held = next((tier for tier in ("device", "host") if i in truth[tier]), None)
            assert index.leading("w", keys(i)) == ({held: 1} if held else {})
        assert index.num_blocks("w") == len(truth["device"] | truth["host"])
