"""The thread and the limits under which grammars of clients are compiled."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from llguidance import LLMatcher

from checkpoint import grammar
from checkpoint.grammar import GrammarThread, problem, reason, refusal
from core.errors import InvalidParameter, Overloaded


@pytest.fixture
def thread():
    made = GrammarThread()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ("no start rule found", "no start rule found"),
        ('at 1(8): unknown name: "x"\n   1 | start: x\n      ^\n', 'at 1(8): unknown name: "x"'),
        (
            'at 1(8): invalid regex "((" (in regex): regex parse error:\n    ((\n     ^\nerror: unclosed group\n',
            "the regular expression is not valid: unclosed group",
        ),
        (
            "Current row has 5001 items; max is 2000\n<non-verbose/>",
            "Current row has 5001 items; max is 2000",
        ),
        ("x" * 1000, "x" * 300),
        ("", "not valid"),
    ],
)
def test_the_sentence_of_an_error(message: str, sentence: str) -> None:
    assert reason(message) == sentence


async def test_chains_that_overflow_an_ordinary_stack_do_not_end_the_process(thread) -> None:
    """Each schema needs the next one: over 1,000 calls of 8 KiB and more, within the longest text."""
    links = 1200
    defs: dict[str, object] = {
        f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(links)
    }
    schema = {"$defs": defs | {f"d{links}": {"type": "string"}}, "$ref": "#/$defs/d0"}
    for text in (
        LLMatcher.grammar_from_json_schema(json.dumps(schema)),
        LLMatcher.grammar_from_lark(
            "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(8000)) + '\nr8000: "x"'
        ),
    ):
        assert 50_000 < len(text) <= grammar.MAX_TEXT_CHARS
        assert await thread.run(lambda text=text: problem(text), "structured_outputs") == ""


async def test_one_that_takes_too_long_is_the_clients_fault_and_one_behind_it_is_not(
    thread, monkeypatch
) -> None:
    monkeypatch.setattr(grammar, "TIMEOUT_S", 0.1)
    release = threading.Event()
    slow = asyncio.create_task(thread.run(release.wait, "response_format"))
    behind = asyncio.create_task(thread.run(int, "response_format"))
    with pytest.raises(InvalidParameter, match="response_format takes longer"):
        await slow
    with pytest.raises(Overloaded):
        await behind
    release.set()
    monkeypatch.undo()
    assert await thread.run(int, "response_format") == 0


async def test_the_queue_has_a_limit(thread, monkeypatch) -> None:
    monkeypatch.setattr(grammar, "MAX_QUEUED", 2)
    release = threading.Event()
    waiting = [asyncio.create_task(thread.run(release.wait, "x")) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await thread.run(int, "x")
    release.set()
    assert await asyncio.gather(*waiting) == [True, True]


async def test_what_the_work_raises_comes_through_and_the_thread_goes_on(thread) -> None:
    def refuse() -> None:
        raise refusal("g.x", problem(LLMatcher.grammar_from_lark('a: "x"')))

    with pytest.raises(InvalidParameter, match=r"g\.x: no start rule") as caught:
        await thread.run(refuse, "g")
    assert caught.value.param == "g"
    assert await thread.run(threading.current_thread, "g") is await thread.run(threading.current_thread, "g")
