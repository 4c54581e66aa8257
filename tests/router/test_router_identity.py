"""Workers that ask for the cluster token, or for a certificate, as a router sees them that has the wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_certificates import Authority
from router_fakes import FakeWorker, fingerprint
from router_stack import stacked

from services.router.text import TextSide
from wire.certificates import ClusterTLS
from wire.channel import Identity

TOKEN = "the-token-of-this-cluster"


def worker(text: TextSide, identity: Identity) -> FakeWorker:
    made = FakeWorker(fingerprint(text.tokenizer_digest))
    made.identity = identity
    return made


@pytest.mark.parametrize("shown", ["", "some-token-of-another"])
async def test_a_wrong_token_is_said_where_operators_look(text: TextSide, shown: str) -> None:
    """In /v1/cluster; /ready, which everybody may read, says no reasons. The token itself stands nowhere."""
    async with stacked(text, [worker(text, Identity(TOKEN))], wait=False, cluster_token=shown) as stack:
        fleet = stack.router.fleet
        assert fleet is not None
        await stack.until(lambda: any(reason for _, _, reason in fleet.workers()))
        (shown_worker,) = (await stack.http.get("/v1/cluster")).json()["workers"]
        assert shown_worker["state"] == "connecting"
        assert "the cluster token is missing or wrong" in shown_worker["reason"]
        ready = await stack.http.get("/ready")
        assert ready.status_code == 503
        for text_shown in (ready.text, str(shown_worker)):
            assert TOKEN not in text_shown
            assert not shown or shown not in text_shown


async def test_the_right_token_and_certificate_open_everything(text: TextSide, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("a")
    identity = Identity(TOKEN, ClusterTLS(cert, key, authority.path))
    settings = {"cluster_token": TOKEN, "cluster_tls_cert": cert, "cluster_tls_key": key}
    async with stacked(text, [worker(text, identity)], cluster_tls_ca=authority.path, **settings) as stack:
        answer = await stack.client.completions.create(model=stack.model, prompt="hi", max_tokens=2)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 2


async def test_a_worker_with_tls_is_no_worker_for_a_router_without(text: TextSide, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    identity = Identity(tls=ClusterTLS(*authority.issue("a"), authority.path))
    async with stacked(text, [worker(text, identity)], wait=False) as stack:
        fleet = stack.router.fleet
        assert fleet is not None
        await stack.until(lambda: any(reason for _, _, reason in fleet.workers()), 15)
        assert (await stack.http.get("/ready")).status_code == 503
