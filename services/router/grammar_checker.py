"""Clients' grammars are judged in a child process, which is what a bad one breaks.

llguidance is native code: there are grammars that end the process they are read in (in 1.9.1 a schema
with the constant -2**63 does). Workers see only what the child has survived.

    router's grammar thread --JSON string, newline--> child
                            <--JSON string, newline-- "" or what is wrong
"""

from __future__ import annotations

import os
import resource
import select
import subprocess
import sys
from collections.abc import Callable
from typing import IO

import orjson

from checkpoint.grammar import GrammarThread, problem, refusal
from core import log
from core.errors import SOON_S, Unavailable
from core.request import Grammar
from services import orphan

START_TIMEOUT_S = 30.0
CHECK_TIMEOUT_S = 3.0
MAX_MEMORY_NBYTES = 2**31

_log = log.get("router")


class GrammarChecker:
    """Starts its child when asked to, and again after a grammar that ended it. Not thread-safe."""

    def __init__(self, count_fault: Callable[[str], None]) -> None:
        """`count_fault` is told of each child that a grammar ended."""
        self._count_fault = count_fault
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> subprocess.Popen[bytes]:
        """The child; blocks until it is ready, so that no grammar's time is spent on that.

        Raises Unavailable when it does not come up.
        """
        if self._child is None:
            self._child = _started()
        return self._child

    def check(self, grammar: Grammar) -> None:
        """Blocks. Raises InvalidParameter that says what is wrong, Unavailable without a child."""
        if wrong := self._ask(self.start(), grammar.text):
            raise refusal(grammar.param, wrong)

    def close(self) -> None:
        """End the child; idempotent."""
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None

    def _ask(self, child: subprocess.Popen[bytes], text: str) -> str:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(orjson.dumps(text) + b"\n")
            child.stdin.flush()
            answer = _line(child.stdout, CHECK_TIMEOUT_S)
        except TimeoutError:
            self._give_up(child)
            return f"takes longer than {CHECK_TIMEOUT_S:g} s to compile; make it smaller"
        except OSError:
            answer = b""
        if not answer:
            self._give_up(child)
            return "the compiler cannot read this; write it another way"
        return orjson.loads(answer)

    def _give_up(self, child: subprocess.Popen[bytes]) -> None:
        """The next grammar gets a new child."""
        self.close()
        self._count_fault("grammar_checker")
        _log.warning("grammar.checker_ended", status=child.returncode)


def _started() -> subprocess.Popen[bytes]:
    child = subprocess.Popen(
        [sys.executable, "-m", "services.router.grammar_checker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {orphan.PARENT: str(os.getpid())},
    )
    assert child.stdout is not None
    try:
        ready = _line(child.stdout, START_TIMEOUT_S)
    except TimeoutError:
        ready = b""
    if not ready:
        child.kill()
        child.communicate()
        raise Unavailable(
            f"the router cannot start its grammar checker (status {child.returncode}); "
            f"send the request without a grammar, or try again",
            retry_after_s=SOON_S,
        )
    return child


def _line(stream: IO[bytes], within_s: float) -> bytes:
    """The next line, b"" when there is none any more. Raises TimeoutError."""
    if not select.select([stream], [], [], within_s)[0]:
        raise TimeoutError
    return stream.readline()


def _serve() -> None:
    """The child: a first line when it is ready, then an answer to each line."""
    say = sys.stdout.buffer
    say.write(orjson.dumps("") + b"\n")
    say.flush()
    for line in sys.stdin.buffer:
        say.write(orjson.dumps(problem(orjson.loads(line))) + b"\n")
        say.flush()


def main() -> None:
    orphan.end_with_parent(os.environ)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_NBYTES, MAX_MEMORY_NBYTES))
    GrammarThread().begin(_serve)  # which the interpreter waits for


if __name__ == "__main__":
    main()
