"""Real processes that show each other certificates and a token, and keep what they are told to themselves."""

from __future__ import annotations

import json
import os
import re
import signal
import ssl
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
from cluster import (
    FLAGS,
    ROOT,
    START_S,
    Cluster,
    Process,
    fresh_salt,
    is_gold,
    matches_gold,
    prompt,
    wait_until,
)
from made_certificates import Authority
from metric_text import families

from core import metric_names
from core.settings import Settings
from services.address import free_port
from wire import channel
from wire.channel import Identity
from wire.v1 import (
    generation_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

KEY = "canary-key-5b2f0d9e"
TOKEN = "canary-token-93cc41a7"
CANARY = "xyzzy quokkas serenade mauve tractors"
SCHEMA = {
    "type": "object",
    "properties": {"quokka_weight": {"type": "integer"}},
    "required": ["quokka_weight"],
}
SECRETS = {"BATON_API_KEY": KEY, "BATON_CLUSTER_TOKEN": TOKEN}
BEARER = {"Authorization": f"Bearer {KEY}"}
LEAKS = re.compile(f"{KEY}|{TOKEN}|xyzzy|quokka|mauve|canary|token_ids|locals ", re.IGNORECASE)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def tls_flags(authority: Authority) -> dict[str, object]:
    """mTLS between the processes, with one certificate for all; HTTPS with another."""
    cert, key = authority.issue("worker", "baton-worker")
    web_cert, web_key = authority.issue("web")
    between = {"cluster_tls_cert": cert, "cluster_tls_key": key, "cluster_tls_ca": authority.path}
    return between | {"cluster_tls_name": "baton-worker", "ssl_certfile": web_cert, "ssl_keyfile": web_key}


@pytest.fixture(scope="module")
def cluster(authority: Authority) -> Iterator[Cluster]:
    """Everything on: HTTPS, an API key, mTLS and a token between the processes, hosts listed, all levels logged.
    Some steps fail, so that errors with tracebacks are logged too."""
    trust = ssl.create_default_context(cafile=authority.path)
    with Cluster(
        tls=trust,
        headers=BEARER,
        env=SECRETS,
        transport="shm",
        log_level="debug",
        host_cache_bytes="64MiB",
        transfer_hosts="127.0.0.0/8",
        prefill_flags={"faults": "prefill.publish@3=raise"},
        decode_flags={"faults": "decode.start@9=raise,engine.step@40=raise,transfer.read@3=raise"},
        **tls_flags(authority),
    ) as cluster:
        yield cluster


@pytest.mark.parametrize("plan", ["disaggregated", "local"])
def test_the_answer_is_the_same_under_tls_and_token(cluster: Cluster, plan: str) -> None:
    reply = cluster.complete(prompt("story-65"), plan=plan, cache_salt=fresh_salt(), max_tokens=8)
    assert is_gold(reply, "story-65", 8)
    assert reply.headers["x-baton-plan"] == plan
    with cluster.stream(prompt("story-65"), plan=plan, max_tokens=8) as chunks:
        ids = [
            token for chunk in chunks for c in chunk.get("choices", ()) for token in c.get("token_ids") or ()
        ]
    assert matches_gold("story-65", ids, 8)
    for worker in cluster.workers:
        assert worker.metric("baton_refused_calls_total") == 0


async def test_who_lacks_certificate_or_token_gets_nothing(cluster: Cluster, authority: Authority) -> None:
    """Not a word from any service of a worker: neither KV, nor tokens, nor who it is."""
    good = Identity.of(Settings.model_validate(tls_flags(authority) | {"cluster_token": TOKEN}))
    before = [worker.metric("baton_refused_calls_total") for worker in cluster.workers]
    for worker in cluster.workers:
        address = f"127.0.0.1:{worker.port}"
        async with channel.connect(address, good) as opened:
            hello = (
                await worker_pb2_grpc.WorkerStub(opened).Watch(worker_pb2.WatchRequest(), timeout=5).read()
            )
            assert hello.hello.worker_id == worker.name
        for identity in (channel.OPEN, Identity(TOKEN), Identity(tls=good.tls), Identity("x" * 20, good.tls)):
            async with channel.connect(address, identity) as opened:
                prefill = prefill_pb2_grpc.PrefillStub(opened)
                calls = (
                    worker_pb2_grpc.WorkerStub(opened).Watch(worker_pb2.WatchRequest(), timeout=5).read(),
                    prefill.Connect(prefill_pb2.ConnectRequest(), timeout=5),
                    prefill.Run(prefill_pb2.RunRequest(), timeout=5).read(),
                    generation_pb2_grpc.DecodeStub(opened).Session(timeout=5).read(),
                    worker_pb2_grpc.WorkerStub(opened).SetRole(
                        worker_pb2.SetRoleRequest(role="decode"), timeout=5
                    ),
                )
                for call in calls:
                    with pytest.raises(grpc.aio.AioRpcError):
                        await call
    after = [worker.metric("baton_refused_calls_total") for worker in cluster.workers]
    assert [b - a for a, b in zip(before, after, strict=True)] == [10, 10]


def test_a_router_with_another_token_is_told_why(cluster: Cluster, authority: Authority) -> None:
    """Its /v1/cluster says so; the workers go on for the right one."""
    port = free_port("127.0.0.1")
    flags = {k: v for k, v in cluster.router.first_flags.items() if k != "admin_port"} | {"port": port}
    trust = ssl.create_default_context(cafile=authority.path)
    wrong = SECRETS | {"BATON_CLUSTER_TOKEN": "t" * 20}
    router = Process(
        "stranger", "router", flags | {"log_level": FLAGS["log_level"]}, port, port, wrong, trust
    )
    router.start()
    try:

        def reasons() -> list[str]:
            try:
                reply = httpx.get(f"https://127.0.0.1:{port}/v1/cluster", headers=BEARER, verify=trust)
                return [worker["reason"] or "" for worker in reply.json()["workers"]]
            except (httpx.HTTPError, ValueError, KeyError):
                return []

        wait_until(
            lambda: any("cluster token is missing or wrong" in r for r in reasons()),
            30,
            lambda: str(reasons()),
        )
        assert len(reasons()) == 2
        assert router.ready()["ready"] is False
    finally:
        router.stop()
        text = router.log.read_text()
        router.log.unlink()
    assert not LEAKS.search(text.replace("127.0.0.1", ""))
    assert is_gold(cluster.complete(prompt("story-65"), max_tokens=4), "story-65", 4)


def leaky_requests(model: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Ways in which a prompt, or a key, comes in, also where it is refused: (path, arguments of httpx.post)."""
    says = {"model": model, "messages": [{"role": "user", "content": CANARY}], "max_tokens": 6}
    prompts = {"model": model, "prompt": CANARY, "max_tokens": 6, "cache_salt": uuid.uuid4().hex}
    for plan in ("local", "disaggregated", "auto"):
        long = {"headers": {"X-Baton-Plan": plan}, "json": prompts | {"prompt": CANARY * 20}}
        yield "/v1/completions", long
        yield "/v1/chat/completions", {"headers": {"X-Baton-Plan": plan}, "json": says | {"stream": True}}
    schema = {"type": "json_schema", "json_schema": {"name": "quokka", "schema": SCHEMA}}
    bodies = [
        {"prompt": CANARY * 3000},
        {"prompt": {"text": CANARY}},
        {"prompt": [CANARY, 1]},
        {"prompt": CANARY + "\ud800"},
        {CANARY: 1},
        {"max_tokens": CANARY},
        {"stop": [CANARY] * 99},
        {"model": CANARY},
        {"user": CANARY, "n": 2},
        {"prompt": CANARY, "echo": True, "logprobs": 2},
        {"response_format": schema},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "q", "schema": {"type": CANARY}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "q", "schema": {"const": -(2**63), "title": CANARY}}}},
        {"structured_outputs": {"regex": f"({CANARY}"}},
        {"structured_outputs": {"grammar": f"start: {CANARY}"}},
    ]  # fmt: skip
    for body in bodies:
        yield "/v1/completions", {"content": json.dumps(prompts | body)}
        yield "/v1/chat/completions", {"content": json.dumps({**says, **body, "prompt": None})}
    for broken in (
        f'{{"prompt": "{CANARY}',
        f'{{"prompt": "{CANARY}"}} {CANARY}',
        f'"{CANARY}"',
        CANARY,
        f"\xff{CANARY}",
    ):
        yield "/v1/completions", {"content": broken.encode("latin-1")}
        yield "/tokenize", {"content": broken.encode("latin-1")}
    yield "/v1/completions", {"content": CANARY.encode() * 300_000}
    yield "/tokenize", {"json": {"prompt": CANARY}}
    yield "/detokenize", {"json": {"tokens": [CANARY]}}
    yield f"/v1/completions?api_key={KEY}", {"json": prompts}
    yield "/v1/completions", {"json": prompts, "headers": {"Authorization": f"Bearer {KEY}x"}}
    yield "/v1/completions", {"json": prompts, "headers": {"Authorization": KEY}}
    yield "/v1/completions", {"json": prompts, "headers": {"X-Api-Key": KEY}}
    yield f"/v1/{CANARY.replace(' ', '-')}", {"json": prompts}


def test_keys_tokens_and_prompts_stand_nowhere(cluster: Cluster) -> None:
    """E9. 1. They come in on every way that there is, good and bad, also while steps of the workers fail.  2. No
    log, at debug level, no metric, no page about the cluster and no process list has them."""
    statuses: dict[int, int] = {}
    for path, arguments in leaky_requests(cluster.model):
        headers = BEARER | {"content-type": "application/json"} | arguments.pop("headers", {})
        reply = httpx.post(
            f"{cluster.url}{path}", headers=headers, timeout=60, verify=cluster.verify, **arguments
        )
        statuses[reply.status_code] = statuses.get(reply.status_code, 0) + 1
    with cluster.stream(CANARY, max_tokens=200) as chunks:  # and a client that leaves
        next(chunks)
    assert statuses[200] >= 8
    assert {400, 401, 404, 413} <= statuses.keys(), statuses
    cluster.wait_idle(5.0)
    shown = {process.name: process.log.read_text() for process in cluster.processes}
    assert "InjectedFault" in shown["decode-0"], "no traceback was logged, so nothing was tried"
    assert "engine.step_failed" in shown["decode-0"]
    for path in ("/metrics", "/v1/cluster", "/v1/requests?limit=100", "/ready", "/health"):
        shown[path] = cluster.get(path).text
    for worker in cluster.workers:
        shown[f"{worker.name} metrics"], shown[f"{worker.name} ready"] = (
            worker.metrics(),
            json.dumps(worker.ready()),
        )
    for process in cluster.processes:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        shown[f"{process.name} command"] = " ".join(" ".join(each.cmdline()) for each in family)
    found = {where: LEAKS.findall(text)[:5] for where, text in shown.items() if LEAKS.search(text)}
    assert found == {}


def test_workers_export_the_names_that_dashboards_know(cluster: Cluster) -> None:
    """Who renames a metric has to say so here, and in the release notes. Of those that are declared, each is
    exported by a worker or by the router (`tests/router/test_router_metrics.py`)."""
    data = ROOT / "tests/data"
    exported = families(cluster.worker("decode-0").metrics())
    assert exported == set((data / "worker_metrics.txt").read_text().split())
    assert exported == families(cluster.worker("prefill-0").metrics())
    values = {
        value
        for value in vars(metric_names).values()
        if isinstance(value, str) and value.startswith("baton_")
    }
    golden = exported | set((data / "router_metrics.txt").read_text().split())
    assert {name for name in golden if name.startswith("baton_")} == values
    theirs = {name.removesuffix("_total") for name in golden if name.startswith("vllm:")}
    assert theirs == {alias.removesuffix("_total") for alias in metric_names.VLLM_ALIASES}


@pytest.mark.slow
def test_serve_under_https_and_tls(authority: Authority, tmp_path: Path) -> None:
    """One command starts it all; its children's command lines hold no secret."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in tls_flags(authority).items()]
    log = tmp_path / "log"
    small = ["--port=0", "--num-blocks=64", "--transport=shm", "--min-remote-tokens=16", "--dtype=fp32"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.cli", "serve", *small, *flags],
            cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            env=os.environ | SECRETS, start_new_session=True,
        )  # fmt: skip
    try:
        wait_until(lambda: "Ctrl-C" in log.read_text() or process.poll() is not None, START_S)
        address = re.search(r"https://127\.0\.0\.1:\d+", log.read_text())
        assert address, log.read_text()
        trust = ssl.create_default_context(cafile=authority.path)
        with httpx.Client(base_url=address[0], headers=BEARER, verify=trust, timeout=60) as client:
            model = client.get("/v1/models").json()["data"][0]["id"]
            body = {"model": model, "prompt": prompt("story-65"), "max_tokens": 8, "temperature": 0}
            reply = client.post(
                "/v1/completions",
                json=body | {"return_token_ids": True},
                headers={"X-Baton-Plan": "disaggregated"},
            )
            assert is_gold(reply, "story-65", 8)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 3
        assert not LEAKS.search(" ".join(" ".join(child.cmdline()) for child in children))
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert not LEAKS.search(log.read_text())
    finally:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            process.wait(10)


def test_files_and_tokens_that_cannot_work_end_every_command(authority: Authority) -> None:
    """Exit status 2, one sentence, and no secret in it."""
    cert, _ = authority.issue("one")
    _, other_key = authority.issue("two")
    pair = [
        f"--cluster-tls-cert={cert}",
        f"--cluster-tls-key={other_key}",
        f"--cluster-tls-ca={authority.path}",
    ]
    workers = ["--discovery=static://127.0.0.1:9", "--port=0"]
    for command, flags, env, words in (
        ("serve", pair, SECRETS, "is not the key of --cluster-tls-cert"),
        ("router", [*pair, *workers], SECRETS, "is not the key of --cluster-tls-cert"),
        ("decode", [], {"BATON_CLUSTER_TOKEN": "quokka"}, "the cluster token needs 16"),
    ):
        result = subprocess.run(
            [sys.executable, "-m", "services.cli", command, *flags],
            cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert result.returncode == 2, result.stderr
        assert words in result.stderr.splitlines()[-1]
        assert not LEAKS.search(result.stderr + result.stdout)
    shown = subprocess.run(
        [sys.executable, "-m", "services.cli", "config"],
        cwd=ROOT, env=os.environ | SECRETS, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "environment BATON_CLUSTER_TOKEN" in shown.stdout
    assert not LEAKS.search(shown.stdout + shown.stderr)
