"""`baton explain` against a socket that answers like a router, like something else, or not at all."""

from __future__ import annotations

from collections.abc import Iterator

import orjson
import pytest
from answering_server import AnsweringServer, answering
from request_records import answered

from planning.plan import Reason
from services import cli
from services.address import free_port
from services.explain import WHY
from services.router.record import Record
from services.router.record_json import describe
from services.router.record_summary import summarize

RECORD = describe(answered("mine"))


@pytest.fixture(autouse=True)
def unconfigured_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later tests would log to this one's captured stderr, which is closed by then."""
    monkeypatch.setattr("core.log.configure", lambda *args, **bound: None)


@pytest.fixture
def router() -> Iterator[AnsweringServer]:
    with answering((404, b"not a router")) as server:
        yield server


def explain(capsys, *arguments: str) -> tuple[int, str, str]:
    status = cli.main(["explain", *arguments])
    out, err = capsys.readouterr()
    return status, out, err


def test_it_shows_candidates_the_reason_and_what_it_took(router, capsys):
    router.answers["/v1/requests/mine"] = 200, orjson.dumps(RECORD)
    status, out, _ = explain(capsys, "mine", "--router", router.url + "/")
    assert status == 0
    assert "first token within 300 ms: met, further tokens within 30.0 ms: missed" in out
    lines = [line.split() for line in out.splitlines()]
    [chosen] = [line for line in lines if line[:1] == ["->"]]
    assert chosen[1:5] == ["disaggregated", "decode-0", "prefill-0", "32"]
    assert chosen[9] == "200"
    assert chosen[-1] == "yes"
    assert any(line[:3] == ["local", "decode-1", "-"] for line in lines)
    assert f"because {WHY[Reason.CHEAPEST_PAIR]} (cheapest_pair)" in out
    [first] = [line for line in lines if line[:2] == ["first", "token,"]]
    assert first[-4:] == ["200", "250", "-50.0", "-20%"]
    assert "16 cached on the decode worker" in out


def test_without_a_plan_it_says_so(router, capsys):
    refused = Record("mine", "a-model")
    refused.ended_at, refused.http_status, refused.error = refused.clock(), 429, "overloaded"
    router.answers["/v1/requests/mine"] = 200, orjson.dumps(describe(refused))
    status, out, _ = explain(capsys, "mine", "--router", router.url)
    assert status == 0
    assert "failed with 429 (overloaded)" in out
    assert "never planned" in out


def test_without_an_id_it_lists_the_newest(router, capsys):
    summary = summarize(answered())
    router.answers["/v1/requests"] = 200, orjson.dumps({"object": "list", "data": [summary]})
    status, out, _ = explain(capsys, "--router", router.url)
    assert status == 0
    assert summary.id in out
    assert "cheapest_pair" in out


def test_the_json_is_the_routers_own(router, capsys):
    router.answers["/v1/requests/a%2Fb%20c"] = 200, orjson.dumps(RECORD)
    status, out, _ = explain(capsys, "a/b c", "--json", "--router", router.url)
    assert (status, out.encode()) == (0, orjson.dumps(RECORD) + b"\n")


def test_the_key_comes_from_the_environment_and_goes_nowhere_else(router, capsys, monkeypatch):
    monkeypatch.setenv("BATON_API_KEY", "secret")
    refusal = {"error": {"message": "the API key is wrong", "type": "", "param": None, "code": ""}}
    router.answers["/v1/requests/mine"] = 401, orjson.dumps(refusal)
    status, _, err = explain(capsys, "mine", "--router", router.url)
    assert (status, router.asked) == (1, [("/v1/requests/mine", "Bearer secret", b"")])
    assert "401: the API key is wrong; here it comes from BATON_API_KEY" in err
    router.answers["/v1/requests/mine"] = 302, f"{router.url}/elsewhere".encode()
    status, _, err = explain(capsys, "mine", "--router", router.url)
    assert (status, len(router.asked)) == (1, 2)
    assert "302" in err


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((404, b'{"error": {"message": "no such request"}}'), "404: no such request"),
        ((404, b"<html>"), "is the URL right?"),
        ((500, b"[]"), "is the URL right?"),
        ((200, b'{"id": 5}'), "--json shows the answer"),
        ((200, b"hello"), "--json shows the answer"),
    ],
)
def test_an_answer_that_is_none_is_a_sentence(router, capsys, answer, words):
    router.answers["/v1/requests/mine"] = answer
    status, out, err = explain(capsys, "mine", "--router", router.url)
    assert (status, out) == (1, "")
    assert err.startswith("baton: ")
    assert words in err


def test_nobody_there_is_a_sentence(capsys):
    port = free_port("127.0.0.1")
    status, _, err = explain(capsys, "mine", "--port", str(port))
    assert status == 1
    assert f"no router answers at http://127.0.0.1:{port}" in err
    assert "--router" in err


def test_a_url_that_is_none_ends_with_two(capsys):
    status, _, err = explain(capsys, "mine", "--router", "127.0.0.1:8000")
    assert (status, "http://" in err) == (2, True)


def test_every_reason_has_its_words():
    assert WHY.keys() == set(Reason)
