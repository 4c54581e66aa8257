"""Exact versions for the images: `python -m deploy.check.pins > deploy/docker/constraints.txt` takes those of
this environment, which has passed the tests."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EXTRAS = ("worker", "dns")
"""Of all images together."""

HEAD = """\
# Exact versions of what the images install, of an environment that has passed the tests.
# Made by `python -m deploy.check.pins`.
"""


def requirements(name: str, extras: Iterable[str]) -> list[Requirement]:
    """What an installed distribution wants in this environment, with these extras."""
    wanted = map(Requirement, distribution(name).requires or ())
    chosen = [{"extra": extra} for extra in (*extras, "")]
    return [each for each in wanted if not each.marker or any(map(each.marker.evaluate, chosen))]


def closure(name: str, extras: Iterable[str]) -> dict[str, list[Requirement]]:
    """Every distribution that an installed one needs, itself left out -> who wants it and how.

    Raises importlib.metadata.PackageNotFoundError for one that is not installed.
    """
    found: dict[str, list[Requirement]] = {}
    left = [(canonicalize_name(name), frozenset(extras))]
    seen = set(left)
    while left:
        for wanted in requirements(*left.pop()):
            key = canonicalize_name(wanted.name)
            found.setdefault(key, []).append(wanted)
            step = (key, frozenset(wanted.extras))
            if step not in seen:
                seen.add(step)
                left.append(step)
    return found


def pinned(name: str) -> str:
    """`name==version`; a local part such as +cpu says where a wheel came from and is left out."""
    return f"{name}=={distribution(name).version.partition('+')[0]}"


if __name__ == "__main__":
    print(HEAD + "\n".join(map(pinned, sorted(closure("baton", EXTRAS)))))
