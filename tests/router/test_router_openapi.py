"""`/openapi.json` tells of every route and parameter; what FastAPI refuses is our envelope."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.openapi.models import OpenAPI
from fastapi.routing import APIRoute

from core.settings import Settings
from planning.plan import Forced, Reason
from services.router.app import create_app
from services.router.parse import NO_EFFECT
from services.router.router import Router
from services.router.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from services.router.targets import ITL_HEADER, TTFT_HEADER

BODIES = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}


@pytest.fixture(scope="module")
def app():
    return create_app(Router(Settings()))


@pytest.fixture(scope="module")
def document(app) -> dict[str, Any]:
    return app.openapi()


def routes(app) -> dict[str, set[str]]:
    return {r.path_format: {m.lower() for m in r.methods} for r in app.routes if isinstance(r, APIRoute)}


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from references(item)


def resolved(document: dict[str, Any], ref: str) -> Any:
    node: Any = document
    for step in ref.removeprefix("#/").split("/"):
        node = node[step]
    return node


def operations(document) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        yield from ((path, operation) for operation in methods.values())


def test_the_document_is_valid_and_lists_every_route(app, document):
    OpenAPI.model_validate(document)
    assert {path: set(methods) for path, methods in document["paths"].items()} == routes(app)
    ids = [operation["operationId"] for _, operation in operations(document)]
    assert len(set(ids)) == len(ids)
    refs = set(references(document))
    assert len(refs) > 5
    assert all(resolved(document, ref) for ref in refs)


def test_the_document_lists_every_parameter(document):
    for path, body in BODIES.items():
        operation = document["paths"][path]["post"]
        schema = resolved(document, operation["requestBody"]["content"]["application/json"]["schema"]["$ref"])
        generates = path.startswith("/v1/")
        assert set(schema["properties"]) == {*body.model_fields, *(NO_EFFECT if generates else ())}
        assert schema["additionalProperties"] is False
        if generates:
            forced, *targets = operation["parameters"]
            assert (forced["name"], forced["schema"]["enum"]) == ("X-Baton-Plan", list(Forced))
            assert [header["name"] for header in targets] == [TTFT_HEADER, ITL_HEADER]
            headers = operation["responses"]["200"]["headers"]
            assert headers["X-Baton-Reason"]["schema"]["enum"] == list(Reason)
    prompt = document["components"]["schemas"]["CompletionBody"]["properties"]["prompt"]
    assert [form.get("items", {}).get("type") for form in prompt["anyOf"]] == [
        *(None, "integer", "string", "array")
    ]


def test_every_route_answers_errors_with_the_envelope_and_wants_the_key(document):
    for path, operation in operations(document):
        for status in ("4XX", "5XX"):
            schema = operation["responses"][status]["content"]["application/json"]["schema"]
            envelope = resolved(document, schema["$ref"])
            error = resolved(document, envelope["properties"]["error"]["$ref"])
            assert set(error["properties"]) == {"message", "type", "param", "code"}
        assert "422" not in operation["responses"]
        assert operation["security"] == (
            [] if path in ("/startup", "/live", "/health", "/ready") else [{"key": []}]
        )


async def test_the_document_is_served_with_the_key_and_no_pages_are(stack_of):
    async with stack_of(key="k") as stack:
        answer = await stack.http.get("/openapi.json")
        assert answer.json()["openapi"].startswith("3.1")
        for path in ("/docs", "/redoc", "/docs/oauth2-redirect"):
            assert (await stack.http.get(path)).status_code == 404
        stack.http.headers.pop("authorization")
        assert (await stack.http.get("/openapi.json")).status_code == 401


async def test_wrong_methods_are_envelopes_and_head_is_get_without_a_body(stack_of, app):
    async with stack_of() as stack:
        for path, methods in routes(app).items():
            path = path.replace("{id}", stack.model)
            wrong = await stack.http.delete(path)
            assert (wrong.status_code, set(wrong.json())) == (405, {"error"})
            assert wrong.json()["error"]["code"] == "method_not_allowed"
            assert wrong.headers["allow"] == ("GET, HEAD" if "get" in methods else "POST")
            head = await stack.http.head(path)
            found = 404 if path.startswith("/v1/requests/") else 200
            assert (head.status_code, head.content) == (found if "get" in methods else 405, b"")
            gone = await stack.http.get(f"/x{path}/")
            assert (gone.status_code, gone.json()["error"]["code"]) == (404, "not_found")
        found = set(
            re.findall(r'baton_requests_total\{route="([^"]+)"', (await stack.http.get("/metrics")).text)
        )
        assert found == {*routes(app), "other"}
