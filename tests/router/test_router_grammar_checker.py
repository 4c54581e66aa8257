"""The child process that judges grammars: whatever becomes of it, the router goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from llguidance import LLMatcher

from core.errors import InvalidParameter, Unavailable
from core.request import Grammar
from services.router import grammar_checker
from services.router.grammar_checker import GrammarChecker

GOOD = Grammar(LLMatcher.grammar_from_regex("a+"), "structured_outputs.regex")
BAD = Grammar(LLMatcher.grammar_from_regex("("), "structured_outputs.regex")
DEADLY = Grammar('{"grammars": [{"json_schema": {"const": {"n": -9223372036854775808}}}]}', "response_format")


@pytest.fixture
def faults() -> list[str]:
    return []


@pytest.fixture
def checker(faults) -> Iterator[GrammarChecker]:
    made = GrammarChecker(faults.append)
    yield made
    made.close()


def pid(checker: GrammarChecker) -> int:
    assert checker._child is not None
    return checker._child.pid


def test_one_child_judges_many(checker, faults) -> None:
    checker.check(GOOD)
    first = pid(checker)
    with pytest.raises(InvalidParameter, match="unclosed group") as caught:
        checker.check(BAD)
    assert caught.value.param == "structured_outputs"
    checker.check(GOOD)
    assert pid(checker) == first
    assert faults == []


def test_a_grammar_that_ends_the_child_is_refused_and_the_next_is_judged(checker, faults) -> None:
    with pytest.raises(InvalidParameter, match="cannot read this") as caught:
        checker.check(DEADLY)
    assert caught.value.param == "response_format"
    checker.check(GOOD)
    assert faults == ["grammar_checker"]


def test_a_child_that_was_killed_in_between_costs_one_request(checker) -> None:
    checker.check(GOOD)
    os.kill(pid(checker), signal.SIGKILL)
    with pytest.raises(InvalidParameter):
        checker.check(GOOD)
    checker.check(GOOD)


def test_one_that_does_not_answer_is_ended(checker, monkeypatch) -> None:
    checker.check(GOOD)
    stopped = pid(checker)
    os.kill(stopped, signal.SIGSTOP)
    _, status = os.waitpid(stopped, os.WUNTRACED)  # it stops only when the signal reaches it
    assert os.WIFSTOPPED(status)
    monkeypatch.setattr(grammar_checker, "CHECK_TIMEOUT_S", 0.1)
    with pytest.raises(InvalidParameter, match="takes longer"):
        checker.check(GOOD)
    with pytest.raises(ProcessLookupError):
        os.kill(stopped, 0)
    monkeypatch.undo()
    checker.check(GOOD)


def test_close_leaves_no_child(checker) -> None:
    checker.check(GOOD)
    child = pid(checker)
    checker.close()
    checker.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_a_child_that_cannot_start_is_not_the_clients_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checker.sys, "executable", "/bin/false")
    checker = grammar_checker.GrammarChecker(lambda _: None)
    with pytest.raises(Unavailable, match="cannot start its grammar checker"):
        checker.start()
    checker.close()
