"""Step models from made-up machines: known coefficients, noise, outliers, a load that never varies, drift."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from core.step_model import GUESSED_DECODE, GUESSED_PREFILL, StepModel
from engine.step_fit import StepFit, StepLoad, StepTimes

CPU_PREFILL = StepModel(0.02, 0.0012, 2e-7)
CPU_DECODE = StepModel(0.015, 0.002, 1e-6)
GPU_PREFILL = StepModel(0.02, 0.00002, 1e-9)
GPU_DECODE = StepModel(0.004, 0.00003, 1e-8)

Step = tuple[float, float, float]


def steps(model: StepModel, most: int, noise: float, seed: int = 0) -> Iterator[Step]:
    """x, y and seconds of steps with 1 to `most` tokens or sequences behind contexts of up to 2000."""
    rng = random.Random(seed)
    while True:
        x = rng.randint(1, most)
        y = x * rng.uniform(0, 2000)
        yield x, y, model.seconds(x, y) * (1 + rng.gauss(0, noise))


def fitted(guess: StepModel, given: Iterator[Step], count: int, x_scale: float = 64) -> StepFit:
    fit = StepFit(guess, x_scale)
    learn(fit, given, count)
    return fit


def learn(fit: StepFit, given: Iterator[Step], count: int) -> None:
    for _ in range(count):
        fit.add(*next(given))


@pytest.mark.parametrize(
    ("guess", "true", "most"),
    [
        (GUESSED_PREFILL, CPU_PREFILL, 256),
        (GUESSED_PREFILL, GPU_PREFILL, 2048),
        (GUESSED_DECODE, CPU_DECODE, 16),
        (GUESSED_DECODE, GPU_DECODE, 64),
    ],
    ids=["cpu-prefill", "gpu-prefill", "cpu-decode", "gpu-decode"],
)
@pytest.mark.parametrize("seed", range(3))
def test_coefficients_are_found(guess: StepModel, true: StepModel, most: int, seed: int) -> None:
    fit = fitted(guess, steps(true, most, noise=0.02, seed=seed), 500, x_scale=most)
    assert (fit.model.a, fit.model.b) == (pytest.approx(true.a, rel=0.05), pytest.approx(true.b, rel=0.05))
    assert fit.model.seconds(most, most * 2000) == pytest.approx(true.seconds(most, most * 2000), rel=0.05)
    assert fit.model.num_steps == 500


def test_outliers_change_little() -> None:
    """One step in ten is held up for up to fifty times as long."""
    given, rng = steps(CPU_DECODE, 16, noise=0.05), random.Random(1)
    held_up = ((x, y, s * rng.uniform(3, 50) if rng.random() < 0.1 else s) for x, y, s in given)
    fit = fitted(GUESSED_DECODE, held_up, 500)
    for x, y in ((1, 100), (8, 8000), (16, 32_000)):
        assert fit.model.seconds(x, y) == pytest.approx(CPU_DECODE.seconds(x, y), rel=0.15)


@pytest.mark.parametrize("first", [0.01, 100.0], ids=["too-fast", "too-slow"])
def test_a_first_step_that_is_far_off_is_soon_forgotten(first: float) -> None:
    fit, given = StepFit(GUESSED_DECODE, 64), steps(CPU_DECODE, 16, noise=0.02)
    fit.add(4, 400, first * CPU_DECODE.seconds(4, 400))
    learn(fit, given, 200)
    assert fit.model.seconds(8, 8000) == pytest.approx(CPU_DECODE.seconds(8, 8000), rel=0.1)


def test_the_guess_gives_proportions_and_the_first_step_the_speed() -> None:
    fit = StepFit(GUESSED_PREFILL, 256)
    fit.add(100, 5000, GUESSED_PREFILL.seconds(100, 5000) / 50)
    assert fit.model.seconds(200) == pytest.approx(GUESSED_PREFILL.seconds(200) / 50)


def test_steps_that_do_not_vary_leave_what_was_known() -> None:
    """1. Steps of all sizes. 2. Ten thousand of one size, with noise. 3. The other sizes are still known."""
    fit, rng = fitted(GUESSED_DECODE, steps(CPU_DECODE, 16, noise=0.02), 300), random.Random(1)
    for _ in range(10_000):
        fit.add(4, 4000, CPU_DECODE.seconds(4, 4000) * (1 + rng.gauss(0, 0.05)))
    for x, y in ((1, 100), (4, 4000), (16, 32_000)):
        assert fit.model.seconds(x, y) == pytest.approx(CPU_DECODE.seconds(x, y), rel=0.1)


def test_one_size_only_is_foreseen_at_that_size() -> None:
    fit = fitted(GUESSED_DECODE, iter([(4.0, 4000.0, 0.03)] * 100), 100)
    assert fit.model.seconds(4, 4000) == pytest.approx(0.03, rel=0.01)
    assert min(fit.model.a, fit.model.b, fit.model.c) >= 0


@pytest.mark.parametrize("factor", [0.1, 0.5, 2.0, 10.0])
def test_a_machine_that_changes_is_followed(factor: float) -> None:
    fit = fitted(GUESSED_DECODE, steps(CPU_DECODE, 16, noise=0.05), 500)
    changed = StepModel(factor * CPU_DECODE.a, factor * CPU_DECODE.b, factor * CPU_DECODE.c)
    learn(fit, steps(changed, 16, noise=0.05, seed=1), 200)
    for x, y in ((1, 100), (8, 8000), (16, 32_000)):
        assert fit.model.seconds(x, y) == pytest.approx(changed.seconds(x, y), rel=0.1)


def test_no_coefficient_is_negative() -> None:
    """More sequences cost less here: the best line would fall."""
    rng = random.Random(0)
    falling = ((float(x), 0.0, 0.1 - 0.005 * x) for x in iter(lambda: rng.randint(1, 16), None))
    fit = StepFit(GUESSED_DECODE, 16)
    for _ in range(300):
        fit.add(*next(falling))
        assert min(fit.model.a, fit.model.b, fit.model.c) >= 0
    assert 0.02 < fit.model.seconds(8) < 0.1


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e-9, 1e6])
def test_whatever_a_step_took_the_model_stays_one(seconds: float) -> None:
    fit = fitted(GUESSED_DECODE, steps(CPU_DECODE, 16, noise=0.02), 20)
    learn(fit, iter([(3.0, 500.0, seconds)] * 200), 200)
    assert 0 < fit.model.seconds(3, 500) < 1e7
    assert min(fit.model.a, fit.model.b, fit.model.c) >= 0


@pytest.mark.parametrize(
    ("chunks", "load"),
    [
        ([], StepLoad()),
        ([(9, 1), (0, 1)], StepLoad(sequences=2, context=11)),
        ([(0, 100)], StepLoad(tokens=100, products=5000)),
        ([(200, 100), (9, 1), (0, 2)], StepLoad(102, 25_002, 1, 10)),
    ],
)
def test_what_a_step_computes(chunks: list[tuple[int, int]], load: StepLoad) -> None:
    assert StepLoad.of(chunks) == load


def test_a_mixed_step_tells_of_prompts_what_decodes_do_not_explain() -> None:
    """Steps of either kind and of both, whose fixed part counts once."""
    times, rng = StepTimes(256, 64), random.Random(0)
    for i in range(900):
        sequences = 0 if i % 3 == 0 else rng.randint(1, 16)
        tokens = 0 if i % 3 == 1 else rng.randint(2, 256)
        load = StepLoad(
            tokens, tokens * rng.uniform(0, 2000), sequences, sequences * int(rng.uniform(0, 2000))
        )
        model = CPU_PREFILL.beside(CPU_DECODE, sequences, load.context) if tokens else CPU_DECODE
        x, y = (tokens, load.products) if tokens else (sequences, load.context)
        times.measured(load, model.seconds(x, y) * (1 + rng.gauss(0, 0.02)))
    for found, true in ((times.prefill, CPU_PREFILL), (times.decode, CPU_DECODE)):
        assert (found.a, found.b) == (pytest.approx(true.a, rel=0.05), pytest.approx(true.b, rel=0.05))
    assert (times.prefill.num_steps, times.decode.num_steps) == (600, 300)
