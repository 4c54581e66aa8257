from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvtransfer.ledger import Ledger


class Quiet(list):
    """Collects what `on_quiet` announces."""

    def __call__(self, block_ids):
        self.extend(block_ids)


def test_blocks_without_operations_are_free_at_once():
    ledger = Ledger(Quiet())
    assert ledger.release("a", [1, 2]) == [1, 2]
    assert ledger.quarantined == 0


def test_blocks_in_flight_come_back_when_the_operation_ends():
    quiet = Quiet()
    ledger = Ledger(quiet)
    operation = ledger.begin("a", [1, 2])
    assert ledger.in_flight == 1
    assert ledger.release("a", [1, 2, 3]) == [3]
    assert (ledger.quarantined, quiet) == (2, [])
    ledger.end(operation)
    assert (ledger.quarantined, quiet, ledger.in_flight) == (0, [1, 2], 0)


def test_the_last_of_several_operations_frees_a_block():
    quiet = Quiet()
    ledger = Ledger(quiet)
    first, second = ledger.begin("a", [1, 2]), ledger.begin("a", [2, 3])
    assert ledger.release("a", [1, 2, 3]) == []
    ledger.end(first)
    assert quiet == [1]
    ledger.end(second)
    assert quiet == [1, 2, 3]


def test_end_and_release_are_idempotent():
    quiet = Quiet()
    ledger = Ledger(quiet)
    operation = ledger.begin("a", [1])
    again = ledger.begin("a", [1])
    ledger.release("a", [1])
    assert ledger.release("a", [1]) == []
    ledger.end(operation)
    ledger.end(operation)
    assert quiet == []
    ledger.end(again)
    assert quiet == [1]


def test_ended_operations_of_a_keeper_announce_nothing():
    quiet = Quiet()
    ledger = Ledger(quiet)
    ledger.end(ledger.begin("a", [1]))
    assert quiet == []
    assert ledger.release("a", [1]) == [1]


def test_a_block_in_flight_cannot_be_given_to_another():
    ledger = Ledger(Quiet())
    ledger.begin("a", [1])
    with pytest.raises(ValueError, match="block 1 is still in flight for a, not b"):
        ledger.begin("b", [2, 1])
    assert ledger.in_flight == 1
    with pytest.raises(ValueError, match="belongs to a"):
        ledger.release("b", [1])
    ledger.release("a", [1])
    with pytest.raises(ValueError, match="still in flight"):
        ledger.begin("a", [1])


class LedgerMachine(RuleBasedStateMachine):
    """An allocator that reuses every block as soon as the ledger lets it go."""

    operations = Bundle("operations")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(self.freed)
        self.free = set(range(8))
        self.held: dict[str, set[int]] = {"a": set(), "b": set()}
        self.writing: Counter[int] = Counter()

    def freed(self, block_ids: list[int]) -> None:
        for block in block_ids:
            assert block not in self.free, "freed twice"
            assert not self.writing[block], "freed while it may be written"
            self.free.add(block)

    @rule(owner=st.sampled_from("ab"), count=st.integers(1, 4))
    def allocate(self, owner, count):
        for _ in range(min(count, len(self.free))):
            self.held[owner].add(self.free.pop())

    @rule(target=operations, owner=st.sampled_from("ab"), data=st.data())
    def begin(self, owner, data):
        block_ids = data.draw(st.lists(st.sampled_from(sorted(self.held[owner]) or [0]), unique=True))
        block_ids = [block for block in block_ids if block in self.held[owner]]
        self.writing.update(block_ids)
        return self.ledger.begin(owner, block_ids)

    @rule(operation=consumes(operations), twice=st.booleans())
    def end(self, operation, twice):
        self.writing.subtract(operation.block_ids)
        self.ledger.end(operation)
        if twice:
            self.ledger.end(operation)

    @rule(owner=st.sampled_from("ab"))
    def release(self, owner):
        self.freed(self.ledger.release(owner, self.held[owner]))
        self.held[owner] = set()

    @invariant()
    def every_block_is_somewhere_once(self):
        held = self.held["a"] | self.held["b"]
        assert not self.free & held
        assert len(self.free) + len(held) + self.ledger.quarantined == 8


TestLedgerMachine = LedgerMachine.TestCase
