"""How well an engine foresees its steps: a mixed load on one engine, each step predicted before it is fitted.

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive python -m benchmarks.step_models [--format bf16+int8]
                                                                [--seconds 30] [--rate 0.7] [--itl-slo-ms 0]

Prompts of 20 to 1500 tokens (log-uniform) arrive at random and want 10 to 100 tokens. The errors are of
|predicted / real - 1|; the last line is of the steps that somebody who decodes waits for.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict

import numpy as np

from benchmarks.engine_cells import BLOCK, CACHE_DIR, CHUNK, make_runner
from core.clock import monotonic
from core.request import Request, SamplingParams
from engine.block_pool import BlockPool
from engine.engine import Engine
from engine.kernels.native import NativeKernels
from engine.messages import Add
from engine.profile import small_steps, typical_steps
from engine.scheduler import Scheduler
from engine.step import Limits
from engine.step_fit import StepLoad, StepTimes

LIMITS = Limits(BLOCK, max_model_len=2048, max_num_seqs=16, max_num_batched_tokens=CHUNK, max_waiting=1000)


class Recorder(StepTimes):
    """Keeps what was predicted of each step, and what it took, by the kind of step."""

    def __init__(self) -> None:
        super().__init__(LIMITS.max_num_batched_tokens, LIMITS.max_num_seqs)
        self.steps: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)

    def measured(self, load: StepLoad, seconds: float) -> None:
        model = self.prefill.beside(self.decode, load.sequences, load.context)
        predicted = model.seconds(load.tokens, load.products)
        kind = "mixed" if load.sequences else "prompts"
        if not load.tokens:
            kind, predicted = "decode", self.decode.seconds(load.sequences, load.context)
        self.steps[kind].append((predicted, seconds))
        super().measured(load, seconds)


def run(engine: Engine, seconds: float, rate: float, itl_slo_s: float) -> None:
    rng = random.Random(0)
    started = monotonic()
    arrives, number = 0.0, 0
    while (now := monotonic() - started) < seconds:
        while arrives <= now:
            prompt = tuple(rng.randrange(1000, 40_000) for _ in range(int(20 * 75 ** rng.random())))
            params = SamplingParams(max_tokens=rng.randint(10, 100), seed=number, temperature=0.0)
            engine.handle(Add(Request(f"r{number}", prompt, params, itl_slo_s=itl_slo_s)))
            arrives, number = arrives + rng.expovariate(rate), number + 1
        engine.step()


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicted and real seconds of an engine's steps.")
    parser.add_argument("--format", default="bf16+int8")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rate", type=float, default=0.7, help="requests per second")
    parser.add_argument("--itl-slo-ms", type=float, default=0.0, help="each request's target; 0 = none")
    given = parser.parse_args()
    runner = make_runner(given.format, NativeKernels(CACHE_DIR), 32 * LIMITS.max_model_len)
    times, first = Recorder(), [*small_steps(LIMITS), *typical_steps(LIMITS)]
    runner.warm_up(first)
    for chunks, seconds in zip(first, runner.warm_up(first), strict=True):
        times.measured(StepLoad.of((chunk.start, len(chunk)) for chunk in chunks), seconds)
    print(f"after warm-up: {times.prefill} {times.decode}")
    times.steps.clear()
    pool = BlockPool(runner.cache.raw.shape[0])
    engine = Engine(Scheduler(pool, LIMITS, b"namespace", times=times), runner, lambda events: None)
    run(engine, given.seconds, given.rate, given.itl_slo_ms / 1000)
    print(f"afterwards:    {times.prefill} {times.decode}")
    for kind, steps in times.steps.items():
        predicted, real = np.array(steps).T
        errors = np.abs(predicted / real - 1)
        shares = ", ".join(f"p{q} {np.percentile(errors, q):.1%}" for q in (50, 90))
        print(
            f"{kind}: {len(steps)} steps, error {shares}, of all together {predicted.sum() / real.sum():.3f}"
        )
    held_up = np.array([real for kind in ("decode", "mixed") for _, real in times.steps[kind]])
    print(
        "steps with decodes: "
        + ", ".join(f"p{q} {np.percentile(held_up, q) * 1e3:.0f} ms" for q in (50, 90, 99))
    )


if __name__ == "__main__":
    main()
