"""Stop strings in a stream of text: what may be sent now, and where the answer ends.

    generated   ... A B C | D E F
    released    ... A B C |          the tail "DEF" may begin the stop "DEFGHIJ": it is held back

The match that completes first wins; of those that complete on the same character, the one that
begins first. So the outcome does not depend on how the text was cut into tokens.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Feeds on text, releases what certainly belongs to the answer.

    After `stopped` is True everything further is dropped. Text of a stop string is never released.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._exempt = 0  # characters at the start of `_held` that no match may end in
        self.stopped = False

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Append `text`; returns the characters that can be sent now.

        With `may_stop` False (a minimum length is not reached) no match ends inside `text`, but one
        may begin there.
        """
        if self.stopped:
            return ""
        if not self._stops:
            return text
        self._held += text
        if not may_stop:
            self._exempt = len(self._held)
        cut = self._first_match()
        if cut is not None:
            self.stopped = True
            released, self._held = self._held[:cut], ""
            return released
        return self._release(len(self._held) - self._longest_begun())

    def flush(self) -> str:
        """The answer ended otherwise: the held text belongs to it."""
        return self._release(len(self._held))

    def _release(self, count: int) -> str:
        released, self._held = self._held[:count], self._held[count:]
        self._exempt = max(0, self._exempt - count)
        return released

    def _first_match(self) -> int | None:
        matches = []
        for stop in self._stops:
            begin = self._held.find(stop, max(0, self._exempt - len(stop) + 1))
            if begin >= 0:
                matches.append((begin + len(stop), begin))
        return min(matches)[1] if matches else None

    def _longest_begun(self) -> int:
        """Length of the longest tail that is the beginning of a stop string."""
        return max(self._begun(stop) for stop in self._stops)

    def _begun(self, stop: str) -> int:
        for length in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:length]):
                return length
        return 0
