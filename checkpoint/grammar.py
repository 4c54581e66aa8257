"""Grammars that clients write: what may be compiled, and on which thread. For router and workers alike.

llguidance bounds the time and the memory of a grammar by fuel, but not its recursion: it goes one
call deeper for each link in a chain of rules, and on an ordinary stack of 8 MiB a chain of 1,000
JSON schemas ends the process. So texts have a limit, and everything that parses one runs on a thread
whose stack holds the deepest chain that fits into that limit many times over.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from llguidance import LLMatcher, LLParserLimits

from core.errors import InvalidParameter, Overloaded

MAX_TEXT_CHARS = 2**17
"""Longest grammar; its deepest chain of schemas takes some 20 MiB of stack."""

LIMITS = LLParserLimits(max_lexer_states=20_000, verbose_errors=False)
"""A state takes 1 to 2 KiB, so a grammar at most 40 MiB."""

STACK_NBYTES = 2**28
MAX_QUEUED = 64
TIMEOUT_S = 5.0
MAX_REASON_CHARS = 300

T = TypeVar("T")


def problem(text: str) -> str:
    """What is wrong with a grammar; "" if nothing is, as far as that can be told without the
    model's tokens. On a `GrammarThread` only, where the process may end."""
    if too_long := length_problem(text):
        return too_long
    invalid, messages = LLMatcher.validate_grammar_with_warnings(text, limits=LIMITS)
    return reason(messages[0]) if invalid else ""


def length_problem(text: str) -> str:
    """Why a grammar is too long to be parsed, or ""."""
    if len(text) <= MAX_TEXT_CHARS:
        return ""
    return f"too large: {len(text)} characters when written out, at most {MAX_TEXT_CHARS} are compiled"


def refusal(param: str, message: str) -> InvalidParameter:
    """The client's error: the path of its parameter and the sentence in llguidance's message."""
    return InvalidParameter(f"{param}: {reason(message)}", param=param.partition(".")[0])


def reason(message: str) -> str:
    """The sentence in one of llguidance's error messages, without its excerpts and dumps of state.

    Of a regex's error the line that begins with `error:` says what is wrong, of all others the first.
    """
    message = message.rpartition("failed to compile JSON schema: ")[2]
    lines = [line.strip() for line in message.replace("<non-verbose/>", "").splitlines()]
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if told:
        return f"the regular expression is not valid: {told[0]}"[:MAX_REASON_CHARS]
    return (lines[0] if lines else "not valid")[:MAX_REASON_CHARS]


class GrammarThread:
    """One thread with a deep stack. `run` and `close` belong to the event loop's thread."""

    def __init__(self) -> None:
        before = threading.stack_size(STACK_NBYTES)  # of threads that start from now on
        try:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")
            self._pool.submit(int).result()  # starts it
        finally:
            threading.stack_size(before)
        self._num_queued = 0

    async def run(self, work: Callable[[], T], field: str) -> T:
        """What `work` returns. Raises InvalidParameter naming the body's `field` if it takes longer
        than TIMEOUT_S, Overloaded if it was not even begun by then or too much waits already."""
        if self._num_queued >= MAX_QUEUED:
            raise Overloaded(f"{MAX_QUEUED} grammars wait to be compiled; try again later")
        self._num_queued += 1
        job = self._pool.submit(work)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(job), TIMEOUT_S)
        except TimeoutError:
            if job.cancelled():
                raise Overloaded("the grammar had to wait for others for too long; try again later") from None
            raise InvalidParameter(
                f"{field} takes longer than {TIMEOUT_S:g} s to compile; make it smaller", param=field
            ) from None
        finally:
            self._num_queued -= 1

    def begin(self, work: Callable[[], object]) -> None:
        """Do `work` some time; nobody waits for it, and it should not fail."""
        self._pool.submit(work)

    def close(self) -> None:
        """Drop what waits; returns at once."""
        self._pool.shutdown(wait=False, cancel_futures=True)
