"""Builds the C sources in `cpu/` with the machine's compiler, once per sources, compiler and CPU."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from filelock import FileLock, Timeout

from engine.models.dtype import cpu_flags

SOURCES = Path(__file__).with_name("cpu")
COMPILE_TIMEOUT_S = 120.0

_FLAGS = ("-std=gnu17", "-O3", "-march=native", "-fno-math-errno", "-fPIC", "-Wno-psabi")


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
    said = ""
    for openmp in (("-fopenmp",), ()):
        with tempfile.TemporaryDirectory(dir=library.parent, prefix=f"{library.stem}.") as folder:
            said = _compile_with(compiler, openmp, Path(folder), library)
        if not said:
            return
    raise BuildFailed(f"{compiler} failed: {said}")


def _compile_with(compiler: str, openmp: tuple[str, ...], folder: Path, library: Path) -> str:
    """What the compiler complained of; empty when the library is in its place. All sources at once."""
    deadline = time.monotonic() + COMPILE_TIMEOUT_S
    sources = sorted(SOURCES.glob("*.c"))
    objects = [folder / f"{source.stem}.o" for source in sources]
    commands = [
        [compiler, *_FLAGS, *openmp, "-c", str(source), "-o", str(made)]
        for source, made in zip(sources, objects, strict=True)
    ]
    linked = folder / library.name
    link = [compiler, *_FLAGS, "-shared", *openmp, *map(str, objects), "-o", str(linked)]
    for together in (commands, [link]):
        running = [
            subprocess.Popen(c, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            for c in together
        ]
        try:
            for process in running:
                _, complaint = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
                if process.returncode:
                    return complaint.strip()[-500:] or f"exit status {process.returncode}"
        except subprocess.TimeoutExpired:
            raise BuildFailed(f"{compiler} took longer than {COMPILE_TIMEOUT_S:.0f} s") from None
        finally:
            for process in running:
                process.kill()
                process.communicate()
    linked.replace(library)
    return ""
