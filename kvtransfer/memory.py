"""How much memory a process may still take: the machine's, or its container's when that is less."""

from __future__ import annotations

from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def available_nbytes() -> int:
    """Free and reclaimable bytes under the machine's memory and this process's cgroup v2 limit."""
    meminfo = _numbers(Path("/proc/meminfo"))
    machine = meminfo["MemAvailable"] * 1024
    group = _own_cgroup()
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        stat = _numbers(group / "memory.stat")
    except OSError:
        return machine  # no cgroup v2 memory controller here
    if limit == "max":
        return machine
    page_cache = stat["active_file"] + stat["inactive_file"]  # given back on demand
    return min(machine, int(limit) - used + page_cache)


def _own_cgroup() -> Path:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            return _CGROUPS / line.removeprefix("0::").lstrip("/")
    return _CGROUPS


def _numbers(path: Path) -> dict[str, int]:
    """`name[:] number ...` lines as a dictionary."""
    pairs = (line.split()[:2] for line in path.read_text().splitlines())
    return {pair[0].rstrip(":"): int(pair[1]) for pair in pairs if len(pair) == 2}
