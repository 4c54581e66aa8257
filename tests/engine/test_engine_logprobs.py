"""Log probabilities of prompts through the engine: whole, and with a bound on the rows of logits of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hash_model import Harness, next_token, random_prompt

from core.request import TokenDelta
from engine.batch import Batch
from engine.step import MAX_PROMPT_LOGPROBS


@pytest.mark.parametrize("budget", [32, 2000])
def test_two_long_prompts_get_every_row_in_steps_of_few(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """1. Two clients want the log probabilities of prompts that would both fit one step of 2000 tokens, beside
    one that decodes. 2. No step computes more rows than are allowed. 3. Each gets every token of its prompt,
    under the row before it.
    """
    harness = Harness(num_blocks=200, max_num_batched_tokens=budget)
    rows: list[int] = []
    run = harness.runner.run

    def counting(batch: Batch) -> torch.Tensor:
        rows.append(len(batch.logits_rows))
        return run(batch)

    monkeypatch.setattr(harness.runner, "run", counting)
    wants: dict[str, Any] = {"prompt_logprobs": True, "logprobs": 1}
    prompts = {"a": random_prompt(300, 1), "b": random_prompt(290, 2)}
    harness.add("decodes", random_prompt(5), 30)
    harness.step()
    for name, prompt in prompts.items():
        harness.add(name, prompt, 1, **wants)
    harness.run()
    harness.assert_idle()
    assert max(rows) <= MAX_PROMPT_LOGPROBS + 1
    for name, prompt in prompts.items():
        deltas = [e for e in harness.events if isinstance(e, TokenDelta) and e.request_id == name]
        first, *rest = deltas[0].prompt_logprobs
        assert first is None
        assert [each and each.token_id for each in rest] == prompt[1:]
        best = [each and each.top[0][0] for each in rest]
        assert best == [next_token(prompt[:n]) for n in range(1, len(prompt))]
