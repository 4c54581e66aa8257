"""Plans for the prompts of one request, from what the fleet says of itself."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import replace

from core.blocks import block_key, hash_blocks, num_shareable_blocks
from core.kv import Fingerprint
from core.request import PrefillTarget
from planning.estimate import Targets
from planning.plan import Forced, Plan, RequestFacts, plan
from planning.worker_view import FleetView, Sent
from services.router.fleet import Fleet
from services.router.part import Part
from services.router.router import Router
from services.router.schemas import GenerationBody
from services.router.text import Prompt


async def planned(
    router: Router, body: GenerationBody, prompts: Sequence[Prompt], forced: Forced, targets: Targets
) -> list[tuple[tuple[bytes, ...], Plan]]:
    """Hashes of the full blocks and a plan for each prompt; it sees the load that those before it bring.

    Others get their turn between two prompts. Raises RequestError or Unavailable.
    """
    _, fleet = router.serving()
    plans: list[tuple[tuple[bytes, ...], Plan]] = []
    given: dict[str, Sent] = {}
    for prompt in prompts:
        if plans:
            await asyncio.sleep(0)
        hashes = _hashes(body, prompt, fleet.roster.reference)
        facts = _facts(body, len(prompt.token_ids))
        chosen = plan(
            facts,
            _view(fleet, facts, hashes).given(given),
            forced,
            targets=targets,
            min_remote_tokens=router.settings.min_remote_tokens,
            rng=router.rng,
        )
        for incarnation, sent in chosen.work.items():
            given[incarnation] = given.get(incarnation, Sent()) + sent.times(body.n)
        plans.append((hashes, chosen))
    return plans


def replanned(
    router: Router,
    body: GenerationBody,
    part: Part,
    without: Collection[str],
    forced: Forced,
    targets: Targets,
) -> Plan:
    """A plan for a prompt that goes on from the tokens that have come, on none of the workers `without`
    (incarnations). Each choice may have as many tokens in all as before, or where its client set no limit as
    fit. A handoff that was asked for by name is not insisted on.

    Raises Unavailable, or ContextLengthExceeded where none of the workers can hold it.
    """
    _, fleet = router.serving()
    left = part.plan.max_tokens - part.longest
    facts = replace(
        _facts(body, len(part.prompt.token_ids) + part.longest),
        max_tokens=None if body.limit is None else left,
        default_max_tokens=left,
        prompt_logprobs=body.prompt_logprobs and not part.logprobs,
    )
    chosen = plan(
        facts,
        _view(fleet, facts, part.block_hashes, without),
        Forced.LOCAL if forced is Forced.LOCAL else Forced.AUTO,
        targets=targets,
        min_remote_tokens=router.settings.min_remote_tokens,
        rng=router.rng,
    )
    return replace(chosen, max_tokens=chosen.max_tokens + part.longest)


def target(chosen: Plan) -> PrefillTarget | None:
    """The prefill worker of a plan, as its decode worker is told of it."""
    prefill, remote = chosen.prefill, chosen.remote
    if prefill is None or remote is None:
        return None
    return PrefillTarget(
        worker_id=prefill.worker_id,
        address=prefill.address,
        incarnation=prefill.incarnation,
        min_tokens=remote.min_tokens,
        cached_blocks=remote.cached_tokens // prefill.fingerprint.block_size,
        token_s=remote.token_s,
        queue_s=remote.queue_s,
    )


def _hashes(body: GenerationBody, prompt: Prompt, reference: Fingerprint | None) -> tuple[bytes, ...]:
    """Of its full blocks. None when no worker could hold it: the plan is an error then, and millions of
    tokens take long to hash."""
    if reference is None or len(prompt.token_ids) > reference.max_model_len:
        return ()
    return tuple(hash_blocks(reference.namespace, prompt.token_ids, reference.block_size, body.cache_salt))


def _view(
    fleet: Fleet, facts: RequestFacts, hashes: Sequence[bytes], without: Collection[str] = ()
) -> FleetView:
    """Who may serve it, and what they hold of it; of no use where every logit is wanted."""
    reference = fleet.roster.reference
    size = reference.block_size if reference else 1
    shareable = num_shareable_blocks(facts.num_prompt_tokens, size)
    keys = () if facts.prompt_logprobs else [block_key(each) for each in hashes[:shareable]]
    return fleet.view(keys, facts.num_prompt_tokens + (facts.max_tokens or 1), shareable * size, without)


def _facts(body: GenerationBody, num_prompt_tokens: int) -> RequestFacts:
    return RequestFacts(
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=body.limit,
        default_max_tokens=body.default_limit,
        prompt_logprobs=body.prompt_logprobs,
        param=body.prompt_param,
    )
