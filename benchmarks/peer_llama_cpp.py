"""llama.cpp on a GGUF file as it is: its cells, one JSON object a line. Runs in an environment that has it.

    OMP_NUM_THREADS=1 VENV/bin/python -m benchmarks.peer_llama_cpp FILE.gguf [--seconds 2]

llama-cpp-python's `Llama` holds one sequence, so there are no larger batches.
"""

from __future__ import annotations

import importlib
import os
import random

from benchmarks import cells


class LlamaCppEngine:
    """`cells.Engine` over llama-cpp-python."""

    def __init__(self, path: str, threads: int) -> None:
        llama_cpp = importlib.import_module("llama_cpp")  # not a dependency of this project
        self._llama = llama_cpp.Llama(
            model_path=path,
            n_ctx=cells.MAX_TOKENS,
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
        )
        self._rng = random.Random(1)

    def prefill(self, ids: list[int]) -> object:
        self._llama.reset()
        return self._llama.eval(ids)

    def decode_s(self, batch: int, context: int, seconds: float) -> float | None:
        if batch > 1:
            return None
        self.prefill(cells.prompt(self._rng, context))

        def step() -> None:
            self._llama.n_tokens = context  # `eval` drops what its cache has beyond
            self._llama.eval([1000])

        return cells.best(step, seconds)


def main() -> None:
    parser = cells.options("Measure llama.cpp in a file's own number format.")
    parser.add_argument("path", metavar="FILE.gguf")
    given = parser.parse_args()
    engine = LlamaCppEngine(given.path, len(os.sched_getaffinity(0)))
    engine.prefill([1000])
    cells.say_ready()
    cells.say_cells(engine, given.seconds)


if __name__ == "__main__":
    main()
