"""vLLM on a model's directory: one dtype's cells, one JSON object a line. Runs in an environment that has it.

    VLLM_CPU_KVCACHE_SPACE=2 VENV/bin/python -m benchmarks.peer_vllm DIR [--format bf16] [--seconds 2]

A step is the difference between answers of 17 tokens and of 1, divided by 16. The sequences of a batch share
their prompt, which the prefix cache holds, so that the batch is not prefilled each time.
"""

from __future__ import annotations

import importlib
import random

from benchmarks import cells

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
STEPS = 16


class VLLMEngine:
    """`cells.Engine` over vLLM's offline interface."""

    def __init__(self, folder: str, number_format: str) -> None:
        self._vllm = importlib.import_module("vllm")  # not a dependency of this project
        self._llm = self._vllm.LLM(
            model=folder,
            dtype=DTYPES[number_format],
            max_model_len=2 * cells.MAX_TOKENS,
            max_num_seqs=max(batch for batch, _ in cells.DECODES),
            enable_prefix_caching=True,
            skip_tokenizer_init=True,
        )
        self._rng = random.Random(1)

    def prefill(self, ids: list[int]) -> object:
        return self._generate([ids], 1)

    def decode_s(self, batch: int, context: int, seconds: float) -> float:
        prompts = [cells.prompt(self._rng, context)] * batch
        self._generate(prompts[:1], 1)
        one = cells.best(lambda: self._generate(prompts, 1), seconds / 2)
        more = cells.best(lambda: self._generate(prompts, 1 + STEPS), seconds / 2)
        return (more - one) / STEPS

    def _generate(self, prompts: list[list[int]], max_tokens: int) -> object:
        sampling = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        return self._llm.generate(inputs, sampling, use_tqdm=False)


def main() -> None:
    parser = cells.options("Measure vLLM in one dtype.")
    parser.add_argument("folder", metavar="DIR", help="config.json and safetensors")
    given = parser.parse_args()
    engine = VLLMEngine(given.folder, given.format)
    engine.prefill([1000])
    cells.say_ready()
    cells.say_cells(engine, given.seconds)


if __name__ == "__main__":  # vLLM's own processes import this file again
    main()
