"""Plans for the prompts of one request, from what the fleet says of itself."""

from __future__ import annotations

from collections.abc import Sequence

from core.blocks import block_key, hash_blocks, num_shareable_blocks
from core.request import PrefillTarget
from planning.plan import FleetView, Forced, Plan, Reason, RequestFacts, WorkerView, plan
from services.router.router import Router
from services.router.schemas import GenerationBody
from services.router.text import Prompt


def planned(
    router: Router, body: GenerationBody, prompts: Sequence[Prompt], forced: Forced
) -> list[tuple[tuple[bytes, ...], Plan]]:
    """Hashes of the full blocks and a plan for each prompt; it sees the load that those before it bring.

    Raises RequestError or Unavailable.
    """
    _, fleet = router.serving()
    plans, view = [], fleet.view()
    for prompt in prompts:
        hashes = _hashes(body, prompt, view)
        credits = fleet.roster.credits(_keys(body, prompt, hashes, view))
        chosen = plan(
            _facts(body, prompt),
            view.credited(credits),
            forced,
            min_remote_tokens=router.settings.min_remote_tokens,
            rng=router.rng,
        )
        view = view.after(chosen, body.n)
        plans.append((hashes, chosen))
    return plans


def target(prefill: WorkerView, reason: Reason, min_remote_tokens: int) -> PrefillTarget:
    """A client that forces the handoff gets it for every missing block, else it has to be worth it."""
    return PrefillTarget(
        worker_id=prefill.worker_id,
        address=prefill.address,
        incarnation=prefill.incarnation,
        min_tokens=1 if reason is Reason.FORCED_DISAGGREGATED else min_remote_tokens,
        cached_blocks=int(prefill.credit_tokens) // prefill.fingerprint.block_size,
        token_s=prefill.token_s,
    )


def _hashes(body: GenerationBody, prompt: Prompt, view: FleetView) -> tuple[bytes, ...]:
    """Of its full blocks; the decode workers of a view have one fingerprint. None when no worker could
    hold it: the plan is an error then, and millions of tokens take long to hash."""
    if len(prompt.token_ids) > max((worker.max_tokens for worker in view.decode), default=0):
        return ()
    fingerprint, salt = view.decode[0].fingerprint, body.cache_salt
    return tuple(hash_blocks(fingerprint.namespace, prompt.token_ids, fingerprint.block_size, salt))


def _keys(body: GenerationBody, prompt: Prompt, hashes: Sequence[bytes], view: FleetView) -> list[int]:
    """The blocks that need not be computed where they are held; none where every logit is wanted."""
    if body.prompt_logprobs or not hashes:
        return []
    size = view.decode[0].fingerprint.block_size
    return [block_key(each) for each in hashes[: num_shareable_blocks(len(prompt.token_ids), size)]]


def _facts(body: GenerationBody, prompt: Prompt) -> RequestFacts:
    return RequestFacts(
        num_prompt_tokens=len(prompt.token_ids),
        max_tokens=body.limit,
        default_max_tokens=body.default_limit,
        prompt_logprobs=body.prompt_logprobs,
        param=body.prompt_param,
    )
