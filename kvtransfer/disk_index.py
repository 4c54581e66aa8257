"""What the disk tier believes to be on its disk: bytes, order of use, pins. No I/O."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence


class DiskIndex:
    """Files by path relative to the tier's directory, least recently used first.

    `used_nbytes` counts everything that takes room: files, directories, files being written. It is
    raised before bytes are written and lowered after they are gone, so the disk never holds more:

        begin_write --> writing --> end_write: held, in the index
                                               or gone
        remove: still held, out of the index --> refund: gone

    `on_change(added, removed)` is called with the paths that the index knows since now, and no longer.
    """

    def __init__(
        self,
        capacity_nbytes: int,
        on_change: Callable[[Sequence[str], Sequence[str]], None] = lambda added, removed: None,
    ) -> None:
        self.capacity_nbytes = capacity_nbytes
        self._on_change = on_change
        self._held_nbytes = 0
        self._writing_nbytes = 0
        self._files: OrderedDict[str, int] = OrderedDict()
        self._pins: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, path: str) -> bool:
        return path in self._files

    @property
    def used_nbytes(self) -> int:
        return self._held_nbytes + self._writing_nbytes

    def leading(self, paths: Sequence[str]) -> int:
        """How many of the first paths are held without a gap."""
        return next((i for i, path in enumerate(paths) if path not in self._files), len(paths))

    def replace(self, files: Iterable[tuple[str, int]], held_nbytes: int) -> None:
        """Start over with these files, least recently used first. Pins and writes under way stay."""
        before, self._files = self._files, OrderedDict(files)
        self._held_nbytes = held_nbytes
        added = [path for path in self._files if path not in before]
        self._on_change(added, [path for path in before if path not in self._files])

    def charge(self, nbytes: int) -> None:
        """Directories are made."""
        self._held_nbytes += nbytes

    def refund(self, nbytes: int) -> None:
        """A removed file is gone."""
        self._held_nbytes -= nbytes

    def restore(self, path: str, nbytes: int) -> None:
        """A removed file cannot be deleted; the youngest now, so that another one is tried next."""
        self._files[path] = nbytes
        self._on_change((path,), ())

    def begin_write(self, nbytes: int) -> None:
        self._writing_nbytes += nbytes

    def end_write(self, path: str, nbytes: int, *, written: bool) -> None:
        """A write is over; where it succeeded the file is the most recently used."""
        self._writing_nbytes -= nbytes
        if written:
            self._held_nbytes += nbytes
            self._files[path] = nbytes
            self._files.move_to_end(path)
            self._on_change((path,), ())

    def touch(self, chain: Sequence[str]) -> None:
        """These were used, in chain order. The head ends up youngest: a tail without its head is
        worth nothing, so tails go first."""
        for path in reversed(chain):
            if path in self._files:
                self._files.move_to_end(path)

    def remove(self, path: str) -> int:
        """Forget a file; returns its bytes, still charged, or 0 when it was not known."""
        nbytes = self._files.pop(path, 0)
        if nbytes:
            self._on_change((), (path,))
        return nbytes

    def pin(self, paths: Iterable[str]) -> None:
        self._pins.update(paths)

    def unpin(self, paths: Iterable[str]) -> None:
        for path in paths:
            if self._pins[path] > 1:
                self._pins[path] -= 1
            else:
                del self._pins[path]

    def victims(self, need_nbytes: int, shortfall_nbytes: int = 0) -> list[str] | None:
        """Oldest unpinned files to delete before `need_nbytes` more may be charged.

        `shortfall_nbytes`: what the file system itself lacks. None when deleting all would not do.
        """
        missing = max(self.used_nbytes + need_nbytes - self.capacity_nbytes, shortfall_nbytes)
        chosen: list[str] = []
        if missing <= 0:
            return chosen
        for path, nbytes in self._files.items():
            if path in self._pins:
                continue
            chosen.append(path)
            missing -= nbytes
            if missing <= 0:
                return chosen
        return None
