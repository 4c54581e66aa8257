"""Keys of all sources, read and refused without being told; the admin port is another door (E9)."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import structlog
from test_router_gate import ROUTES

from core.errors import ConfigError, Unauthorized
from core.settings import Settings
from services.router.app import create_admin_app, create_app
from services.router.keys import MAX_KEYS, NO_KEY, AdminKeyRequired, load_keys
from services.router.router import Router

CANARY = "canary-key-51c0"
PROBES = ("/health", "/live", "/ready", "/startup")
ADMIN = [("POST", "/v1/cluster/workers/decode-0/role"), ("GET", "/v1/cluster"), ("GET", "/metrics")]
ADMIN += [("GET", "/version"), ("GET", "/openapi.json"), ("GET", "/nowhere")]


def bearer(key: str) -> str:
    return f"Bearer {key}"


def file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    return str(path)


def test_all_sources_make_one_ring(tmp_path):
    hashed = hashlib.sha256(b"kd").hexdigest()
    path = file(
        tmp_path,
        f'[keys.carol]\nkey = "kc"\nmax_concurrent = 3\nmax_tokens_per_minute = 9\npriority_floor = 2\n'
        f'weight = 2\nadmin = true\n[keys."d.e-f_1"]\nkey_sha256 = "{hashed}"\n',
    )
    ring = load_keys(Settings(api_key="k0", api_keys="alice:ka, bob:k:b", api_keys_file=path))
    names = {key: ring.user(bearer(key)).name for key in ("k0", "ka", "k:b", "kc", "kd")}
    assert names == {"k0": "default", "ka": "alice", "k:b": "bob", "kc": "carol", "kd": "d.e-f_1"}
    share = ring.user("bearer kc").share
    assert (share.max_concurrent, share.max_tokens_per_minute) == (3, 9)
    assert (share.priority_floor, share.weight) == (2, 2)
    for wrong in ("", "Bearer", "Bearer ", "kc", "Basic kc", "Bearer kC", f"Bearer {hashed}"):
        with pytest.raises(Unauthorized):
            ring.user(wrong)
    assert ring.admin(bearer("kc")).name == "carol"
    for no_admin in ("k0", "ka", "kd"):
        with pytest.raises(AdminKeyRequired):
            ring.admin(bearer(no_admin))
    with pytest.raises(Unauthorized):
        ring.admin(bearer("other"))


def test_without_keys_everybody_may_ask():
    ring = load_keys(Settings())
    for header in ("", bearer("anything")):
        assert ring.user(header) is ring.admin(header) is NO_KEY


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "keys: Field required"),
        ("[keys]", "has no keys"),
        ("[keys.a]", "either key or key_sha256"),
        (f'[keys.a]\nkey = "{CANARY}"\nkey_sha256 = "{"0" * 64}"', "either key or key_sha256"),
        ('[keys.a]\nkey = ""', "keys.a.key"),
        (f'[keys.a]\nkey_sha256 = "{CANARY}"', "keys.a.key_sha256"),
        (f'[keys.a]\nkeys = "{CANARY}"', "keys.a.keys"),
        (f'[keys.a]\nkey = "{CANARY}"\nweight = 0', "keys.a.weight"),
        (f'[keys.a]\nkey = "{CANARY}"\nmax_concurrent = -1', "keys.a.max_concurrent"),
        (f'[keys.a]\nkey = "{CANARY}"\npriority_floor = 101', "keys.a.priority_floor"),
        (f'[keys."a b"]\nkey = "{CANARY}"', "letters, digits"),
        (f'[keys.none]\nkey = "{CANARY}"', "stands for requests without"),
        (f'[keys.a]\nkey = "{CANARY}"\n[keys.b]\nkey = "{CANARY}"', "same key"),
        (f'[keys.default]\nkey = "{CANARY}"', "two API keys of the name default"),
        (f'[keys.a]\nkey = "{CANARY}', "not valid TOML"),
        ("\n".join(f'[keys.k{i}]\nkey = "k{i}"' for i in range(MAX_KEYS)), f"a router takes {MAX_KEYS}"),
    ],
)
def test_a_file_that_cannot_work_is_a_sentence_without_keys(tmp_path, text, words):
    with pytest.raises(ConfigError) as caught:
        load_keys(Settings(api_key="k", api_keys_file=file(tmp_path, text)))
    assert words in caught.value.message
    assert CANARY not in caught.value.message


@pytest.mark.parametrize("keys", ["alice", "alice:", ":key", "a b:key", "a:1,a:2"])
def test_an_environment_that_cannot_work(keys):
    with pytest.raises(ConfigError):
        load_keys(Settings(api_keys=keys))


def test_a_file_that_is_not_there():
    with pytest.raises(ConfigError, match="cannot read the keys file"):
        Router(Settings(api_keys_file="/nowhere/keys.toml"))


def test_keys_are_read_again_and_kept_when_that_fails(tmp_path):
    path = file(tmp_path, '[keys.a]\nkey = "old"')
    router = Router(Settings(api_keys_file=path))
    file(tmp_path, f'[keys.a]\nkey = "{CANARY}"')
    router.reload_keys()
    assert router.keys.user(bearer(CANARY)).name == "a"
    with pytest.raises(Unauthorized):
        router.keys.user(bearer("old"))
    file(tmp_path, f'[keys.a]\nkey = "{CANARY}')
    with structlog.testing.capture_logs() as captured:
        router.reload_keys()
    assert [line["event"] for line in captured] == ["router.keys_unchanged"]
    assert CANARY not in repr(captured)
    assert router.keys.user(bearer(CANARY)).name == "a"


async def test_names_are_told_and_keys_are_not(stack_of, tmp_path, capfd):
    path = file(tmp_path, f'[keys.alice]\nkey = "{CANARY}"')
    headers = {"Authorization": f"Bearer {CANARY}"}
    with structlog.testing.capture_logs() as captured:
        async with stack_of(api_keys_file=path) as stack:
            answer = await stack.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
            assert answer.status_code == 200
            await stack.http.post("/v1/completions", json={"prompt": "x"}, headers={"Authorization": CANARY})
            pages = [
                (await stack.http.get(path, headers=headers)).text
                for path in ("/metrics", "/v1/cluster", "/v1/requests")
            ]
    out = capfd.readouterr()
    assert CANARY not in repr(captured) + out.out + out.err + "".join(pages)
    assert 'baton_admissions_total{decision="admitted",key="alice"} 1.0' in pages[0]
    assert 'baton_key_tokens_total{key="alice"} 4.0' in pages[0]


def routes_of(app) -> set[tuple[str, str]]:
    return {
        (method.upper(), path.replace("{id}", "x"))
        for path, methods in app.openapi()["paths"].items()
        for method in methods
    }


async def test_every_route_of_both_ports_wants_a_key(stack_of, tmp_path):
    """Those in the documents, those beside them, and none that is a probe. The admin port wants an admin's."""
    path = file(tmp_path, '[keys.a]\nkey = "ka"\n[keys.root]\nkey = "kr"\nadmin = true')
    async with stack_of(api_keys_file=path) as stack:
        for app, others, keys in (
            (create_app(stack.router), ROUTES, ["", "wrong"]),
            (create_admin_app(stack.router), ADMIN, ["", "wrong", "ka"]),
        ):
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://router") as http:
                for method, path in sorted(routes_of(app) | set(others)):
                    for key in keys:
                        headers = {"Authorization": f"Bearer {key}"} if key else {}
                        answer = await http.request(method, path, headers=headers)
                        if path in PROBES:
                            assert answer.status_code == 200, path
                        else:
                            wanted = (403, "admin_key_required") if key == "ka" else (401, "invalid_api_key")
                            assert (answer.status_code, answer.json()["error"]["code"]) == wanted, path


async def test_the_admin_port_has_what_the_public_one_lacks(stack_of):
    async with stack_of() as stack:
        admin, public = create_admin_app(stack.router), create_app(stack.router)
        assert routes_of(admin) - routes_of(public) == {("POST", "/v1/cluster/workers/x/role")}
        assert not any(path.startswith("/v1/cluster/workers") for _, path in routes_of(public))
        change = "/v1/cluster/workers/decode-0/role"
        assert (await stack.http.post(change, json={"role": "prefill"})).status_code == 404
        transport = httpx.ASGITransport(app=admin)
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as http:
            assert (await http.post(change, json={"role": "wizard"})).status_code == 400
            assert (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 404
            assert "baton_requests_total" in (await http.get("/metrics")).text
            assert (await http.get("/v1/cluster")).json()["workers"][0]["id"] == "decode-0"


def test_a_process_has_both_ports_and_reads_its_keys_on_sighup(tmp_path):
    """1. It says where it listens and where admins do.  2. The admin's key opens both ports, another one's only
    the public one.  3. SIGHUP: the new key is known, the old one is not."""
    path = file(tmp_path, '[keys.root]\nkey = "kr"\nadmin = true\n[keys.a]\nkey = "old"')
    flags = ["--port=0", "--admin-port=0", "--discovery=static://127.0.0.1:9", f"--api-keys-file={path}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "services.cli", "router", *flags], stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        public, admin = (
            f"http://127.0.0.1:{json.loads(process.stderr.readline())['port']}" for _ in range(2)
        )

        def status(url: str, key: str) -> int:
            return httpx.get(f"{url}/version", headers={"Authorization": f"Bearer {key}"}).status_code

        assert [status(public, "kr"), status(public, "old"), status(public, "new")] == [200, 200, 401]
        assert [status(admin, "kr"), status(admin, "old"), status(admin, "x")] == [200, 403, 401]
        file(tmp_path, '[keys.a]\nkey = "new"')
        process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + 10
        while status(public, "new") != 200 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert [status(public, "kr"), status(public, "old"), status(public, "new")] == [401, 401, 200]
        assert status(admin, "new") == 403
    finally:
        process.kill()
        process.communicate()
