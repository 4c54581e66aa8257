"""Which GPU each worker of this machine gets. Pure, and without torch: the launcher asks it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import takewhile

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(environ: Mapping[str, str], device_files: Iterable[str]) -> list[str]:
    """GPUs as CUDA_VISIBLE_DEVICES names them; `device_files`: the names in /dev."""
    if VISIBLE in environ:
        named = (part.strip() for part in environ[VISIBLE].split(","))
        # CUDA reads no further than the first name that is none.
        return list(takewhile(lambda name: name not in ("", "-1"), named))
    # CUDA counts those it finds from 0, whatever their files are numbered.
    found = sum(bool(re.fullmatch(r"nvidia\d+", name)) for name in device_files)
    return [str(i) for i in range(found)]


def split_gpus(gpus: list[str], num_workers: int, each: int = 1) -> list[tuple[str, int]]:
    """For each worker its GPUs, `each` as CUDA_VISIBLE_DEVICES names them, and how many workers share these;
    nothing when there is no GPU. Fewer than `each` are given as they are: the worker says what it lacks."""
    if not gpus:
        return []
    sets = [",".join(gpus[at : at + each]) for at in range(0, max(1, len(gpus) // each) * each, each)]
    chosen = [sets[i % len(sets)] for i in range(num_workers)]
    sharing = Counter(chosen)
    return [(gpu, sharing[gpu]) for gpu in chosen]
