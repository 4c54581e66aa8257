"""Builds the C sources in `cpu/` with the machine's compiler, once per sources, compiler and CPU."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from filelock import FileLock, Timeout

from engine.models.dtype import cpu_flags

SOURCES = Path(__file__).with_name("cpu")
COMPILE_TIMEOUT_S = 120.0

_FLAGS = ("-std=gnu17", "-O3", "-march=native", "-fno-math-errno", "-fPIC", "-shared", "-Wno-psabi")


class BuildFailed(Exception):
    """The message says why, as a phrase for the log; callers go on without native kernels."""


def build(cache_dir: str | os.PathLike[str]) -> Path:
    """The shared library for this machine, compiled into `cache_dir` if it is not there yet.

    Takes some seconds the first time. Raises BuildFailed where there is no compiler, it fails, or the
    folder cannot be written.
    """
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        raise BuildFailed("no C compiler is installed")
    folder = Path(cache_dir).expanduser()
    library = folder / f"kernels-{_key(compiler)}.so"
    if library.exists():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(library.with_suffix(".lock"), timeout=2 * COMPILE_TIMEOUT_S):
            if not library.exists():
                _compile(compiler, library)
    except Timeout:
        raise BuildFailed("another process has been compiling for too long") from None
    except OSError as error:
        raise BuildFailed(f"cannot compile into {folder}: {error}") from error
    return library


def _key(compiler: str) -> str:
    """`-march=native` code runs only where the CPU has all flags of the CPU it was made on."""
    sources = (file.read_text() for file in sorted(SOURCES.iterdir()) if file.suffix in (".c", ".h"))
    parts = (*sources, compiler, *_FLAGS, *sorted(cpu_flags()))
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=12).hexdigest()


def _compile(compiler: str, library: Path) -> None:
    """With OpenMP, so that kernels run in torch's own thread team; without it where that is missing."""
    sources = sorted(map(str, SOURCES.glob("*.c")))
    temporary = library.with_suffix(f".{os.getpid()}.tmp")
    said = ""
    try:
        for openmp in (("-fopenmp",), ()):
            command = [compiler, *_FLAGS, *openmp, *sources, "-o", str(temporary)]
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False
                )
            except subprocess.TimeoutExpired:
                raise BuildFailed(f"{compiler} took longer than {COMPILE_TIMEOUT_S:.0f} s") from None
            if done.returncode == 0:
                temporary.replace(library)
                return
            said = done.stderr.strip()[-500:]
        raise BuildFailed(f"{compiler} failed: {said}")
    finally:
        temporary.unlink(missing_ok=True)
