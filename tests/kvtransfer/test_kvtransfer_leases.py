import pytest

from core.clock import FakeClock
from core.errors import LeaseLost, Overloaded
from kvtransfer.leases import LeaseTable, LeaseView


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(100.0)


@pytest.fixture
def table(clock: FakeClock) -> LeaseTable:
    return LeaseTable(clock, limit=2)


def test_a_lease_expires_once_and_is_forgotten(table, clock):
    table.grant("t", 0, 10.0)
    clock.advance(9.9)
    assert table.expired() == []
    clock.advance(0.1)
    assert table.expired() == ["t"]
    assert table.expired() == []
    assert len(table) == 0


def test_renewal_starts_the_lease_anew(table, clock):
    table.grant("t", 0, 10.0)
    clock.advance(9.0)
    assert table.renew("t", 0) == 10.0
    clock.advance(9.0)
    assert table.expired() == []
    clock.advance(1.0)
    assert table.expired() == ["t"]


@pytest.mark.parametrize(
    ("transfer_id", "epoch", "seconds", "reason"),
    [
        ("other", 1, 0.0, "not held here"),
        ("t", 0, 0.0, "held for epoch 1, not 0"),
        ("t", 2, 0.0, "held for epoch 1, not 2"),
        ("t", 1, 10.0, "ended"),  # expired but not collected yet
    ],
)
def test_what_cannot_be_renewed(table, clock, transfer_id, epoch, seconds, reason):
    table.grant("t", 1, 10.0)
    clock.advance(seconds)
    with pytest.raises(LeaseLost, match=reason):
        table.renew(transfer_id, epoch)


def test_release_is_idempotent_and_bound_to_its_epoch(table):
    table.grant("t", 1, 10.0)
    assert not table.release("t", 0)
    assert table.release("t", 1)
    assert not table.release("t", 1)
    assert len(table) == 0


def test_a_newer_epoch_voids_the_older(table):
    table.grant("t", 1, 10.0)
    table.grant("t", 2, 10.0)
    with pytest.raises(LeaseLost):
        table.renew("t", 1)
    assert not table.release("t", 1)
    assert table.renew("t", 2) == 10.0
    assert len(table) == 1


@pytest.mark.parametrize("epoch", [0, 1])
def test_an_older_or_equal_epoch_is_refused(table, epoch):
    table.grant("t", 1, 10.0)
    with pytest.raises(LeaseLost, match=f"held for epoch 1, {epoch} is void"):
        table.grant("t", epoch, 10.0)


def test_leases_are_bounded_but_a_retry_of_a_held_one_fits(table):
    table.grant("a", 0, 10.0)
    table.grant("b", 0, 10.0)
    with pytest.raises(Overloaded):
        table.grant("c", 0, 10.0)
    table.grant("b", 1, 10.0)
    table.release("a", 0)
    table.grant("c", 0, 10.0)


def test_the_consumer_counts_from_when_it_sent(clock):
    view = LeaseView(clock)
    with pytest.raises(LeaseLost, match="not granted yet"):
        view.check()
    assert view.remaining() == 0.0
    clock.advance(3.0)  # the answer took three seconds
    view.renewed(100.0, 10.0)
    view.check()
    assert view.remaining() == 7.0
    clock.advance(7.0)
    with pytest.raises(LeaseLost, match="ran out"):
        view.check()


def test_the_consumer_always_stops_before_the_producer_frees(table, clock):
    """Whatever the delays of request and reply, D's deadline is not after P's."""
    for epoch, (there, back) in enumerate([(0.0, 0.0), (2.0, 0.0), (0.0, 2.0), (3.0, 3.0)]):
        sent_at = clock()
        clock.advance(there)
        table.grant("t", epoch, 10.0)
        clock.advance(back)
        view = LeaseView(clock)
        view.renewed(sent_at, 10.0)
        clock.advance(view.remaining() - 0.001)
        view.check()
        assert table.expired() == []


def test_a_renewal_extends_and_a_late_reply_changes_nothing(clock):
    view = LeaseView(clock)
    view.renewed(100.0, 10.0)
    view.renewed(105.0, 10.0)
    view.renewed(102.0, 10.0)
    assert view.remaining() == 15.0


def test_a_renewal_is_due_after_a_third(clock):
    view = LeaseView(clock)
    view.renewed(100.0, 9.0)
    assert view.renew_due() == pytest.approx(3.0)
    clock.advance(4.0)
    assert view.renew_due() == 0.0
    view.renewed(104.0, 9.0)
    assert view.renew_due() == pytest.approx(3.0)


def test_a_revoked_lease_stays_lost_with_its_first_reason(clock):
    view = LeaseView(clock)
    view.renewed(100.0, 10.0)
    view.revoke("the stream broke")
    view.revoke("released")
    view.renewed(101.0, 10.0)
    with pytest.raises(LeaseLost, match="the stream broke"):
        view.check()
    assert view.remaining() == 0.0
