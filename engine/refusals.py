"""Why a worker does not take something up: asked before it is queued. Pure."""

from __future__ import annotations

from core.errors import BatonError, ContextLengthExceeded, InvalidParameter, Overloaded
from engine.step import Limits


def refusal(
    limits: Limits, num_blocks: int, num_waiting: int, num_tokens: int, what: str, width: int = 1
) -> BatonError | None:
    """None when it can be queued. `num_blocks`: the pool's; `what`: its `num_tokens` tokens in words;
    `width`: sequences that it becomes.
    """
    if width > limits.max_num_seqs:
        return InvalidParameter(
            f"n = {width} choices are more than the {limits.max_num_seqs} sequences that this worker runs "
            f"at once; ask for fewer, or start it with a larger --max-num-seqs",
            param="n",
        )
    # The rope table ends at max_model_len, and what exceeds an empty pool would wait for ever.
    capacity = num_blocks * limits.block_size
    for room, limit in ((limits.max_model_len, "context"), (capacity, "KV pool")):
        if num_tokens > room:
            advice = "shorten the prompt or lower max_tokens"
            return ContextLengthExceeded(f"{what} exceed this worker's {limit} of {room} tokens; {advice}")
    if num_waiting >= limits.max_waiting:
        return Overloaded(f"{num_waiting} requests are waiting here; try again later")
    return None
