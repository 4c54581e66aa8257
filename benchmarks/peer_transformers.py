"""transformers on a model's directory: one dtype's cells, one JSON object a line.

    OMP_NUM_THREADS=1 python -m benchmarks.peer_transformers DIR [--format bf16] [--seconds 2]

Decode is one step over a `DynamicCache` full of random numbers, which is what `generate` uses.
"""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks import cells

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class TransformersEngine:
    """`cells.Engine` with a whole prompt in one forward pass."""

    def __init__(self, folder: str, number_format: str) -> None:
        self._dtype = DTYPES[number_format]
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=self._dtype).eval()

    @torch.inference_mode()
    def prefill(self, ids: list[int]) -> object:
        return self._model(input_ids=torch.tensor([ids]), use_cache=True, logits_to_keep=1).logits

    @torch.inference_mode()
    def decode_s(self, batch: int, context: int, seconds: float) -> float:
        config = self._model.config
        cache = DynamicCache()
        for layer in range(config.num_hidden_layers):
            shape = (batch, config.num_key_value_heads, context, config.head_dim)
            cache.update(torch.randn(shape, dtype=self._dtype), torch.randn(shape, dtype=self._dtype), layer)
        ids = torch.arange(1000, 1000 + batch)[:, None]

        def step() -> None:
            self._model(input_ids=ids, past_key_values=cache, use_cache=True)
            cache.crop(-1)

        return cells.best(step, seconds)


def main() -> None:
    parser = cells.options("Measure transformers in one dtype.")
    parser.add_argument("folder", metavar="DIR", help="config.json and safetensors")
    given = parser.parse_args()
    engine = TransformersEngine(given.folder, given.format)
    engine.prefill([1000])
    cells.say_ready()
    cells.say_cells(engine, given.seconds)


if __name__ == "__main__":
    main()
