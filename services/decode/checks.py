"""The last gate before the engine: what would break a step is refused here. Pure."""

from __future__ import annotations

from core.errors import InvalidParameter
from core.request import Request


def check(request: Request, vocab_size: int) -> None:
    """Raises InvalidParameter for what no engine could run."""
    s = request.sampling
    ids = [*request.prompt_token_ids, *s.stop_token_ids, *s.allowed_token_ids]
    ids += [token for token, _ in s.logit_bias] + [token for word in s.bad_words for token in word]
    ids += [token for _, output in request.resumed for token in output]
    if not request.prompt_token_ids:
        raise InvalidParameter("the prompt holds no tokens; send at least one", param="prompt")
    if max(ids) >= vocab_size:
        raise InvalidParameter(
            f"token id {max(ids)} is outside the vocabulary of {vocab_size}", param="prompt"
        )
    if s.n < 1 or s.max_tokens < 1 or s.temperature < 0 or s.repetition_penalty <= 0:
        raise InvalidParameter("n, max_tokens, temperature or repetition_penalty is out of range")
    if request.resumed:
        _check_resumed(request)


def _check_resumed(request: Request) -> None:
    s, indices = request.sampling, [index for index, _ in request.resumed]
    if len(set(indices)) < len(indices) or max(indices) >= s.n:
        raise InvalidParameter(
            f"resumed: each of {s.n} choices may go on once, not {indices}", param="resumed"
        )
    if any(len(output) >= s.max_tokens for _, output in request.resumed):
        raise InvalidParameter(f"resumed: a choice has its {s.max_tokens} tokens already", param="resumed")
    if s.prompt_logprobs:
        raise InvalidParameter(
            "resumed: log probabilities of the prompt come with the first token of all", param="resumed"
        )
