"""The document at `/openapi.json`: the routes as FastAPI knows them, the bodies as `schemas` has them.

Bodies are parsed by `parse`, whose errors name the field, so FastAPI does not know them; here they
are put in beside what it writes.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import models_json_schema

from core.request import PlanKind
from planning.plan import Forced, Reason
from services.router.gate import OPEN_PATHS
from services.router.parse import NO_EFFECT
from services.router.record_json import RequestRecord
from services.router.record_summary import RequestList
from services.router.records import DEFAULT_LISTED, MAX_LISTED
from services.router.schemas import ChatBody, CompletionBody, DetokenizeBody, RoleBody, TokenizeBody
from services.router.targets import ITL_HEADER, TTFT_HEADER

JSON = dict[str, Any]
SCHEMA_REF = "#/components/schemas/{model}"


class ErrorDetails(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(BaseModel):
    """The body of every error; `docs/api.md` lists the codes."""

    error: ErrorDetails


MODELS: tuple[type[BaseModel], ...] = (
    *(CompletionBody, ChatBody, TokenizeBody, DetokenizeBody, RoleBody),
    ErrorEnvelope,
)


def _content(model: type) -> JSON:
    return {"application/json": {"schema": {"$ref": SCHEMA_REF.format(model=model.__name__)}}}


ERRORS: dict[int | str, JSON] = {
    "4XX": {
        "description": "The client has to change or repeat the request",
        "content": _content(ErrorEnvelope),
    },
    "5XX": {"description": "It could not be answered", "content": _content(ErrorEnvelope)},
}

NOT_READY: dict[int | str, JSON] = {
    503: {
        "description": "Not ready; the body is that of a 200",
        "content": {"application/json": {"schema": {}}},
    }
}

BEGUN: dict[int | str, JSON] = {
    202: {"description": "It has begun", "content": {"application/json": {"schema": {}}}}
}

GENERATED: dict[int | str, JSON] = {
    200: {
        "description": "The answer; with `stream` it comes as events, the last one `data: [DONE]`",
        "content": {
            "application/json": {"schema": {"type": "object"}},
            "text/event-stream": {"schema": {"type": "string"}},
        },
        "headers": {
            "X-Baton-Plan": {"schema": {"enum": list(PlanKind)}},
            "X-Baton-Reason": {"schema": {"enum": list(Reason)}},
            "X-Baton-Prefill": {"schema": {"type": "string"}},
            "X-Baton-Decode": {"schema": {"type": "string"}},
            "X-Baton-Predicted-TTFT-MS": {"schema": {"type": "number"}},
        },
    }
}


def takes(body: type[BaseModel]) -> JSON:
    """The `openapi_extra` of a route that parses `body`, one of MODELS, itself."""
    return {"requestBody": {"required": True, "content": _content(body)}}


def generates(body: type[BaseModel]) -> JSON:
    """`takes`, and the headers that force a plan and set targets."""
    plan = {"name": "X-Baton-Plan", "in": "header", "schema": {"enum": list(Forced), "default": Forced.AUTO}}
    targets = [
        {"name": name, "in": "header", "schema": {"type": "number", "minimum": 0}}
        for name in (TTFT_HEADER, ITL_HEADER)
    ]
    return {**takes(body), "parameters": [plan, *targets]}


def _json_answer(description: str, kind: type) -> dict[int | str, JSON]:
    return {200: {"description": description, "content": _content(kind)}}


RECORDS = _json_answer("The newest requests that the key may see", RequestList)
RECORD = _json_answer("What was planned for a request, why, and what it took", RequestRecord)
LIMITED: JSON = {
    "parameters": [
        {
            "name": "limit",
            "in": "query",
            "schema": {"type": "integer", "minimum": 1, "maximum": MAX_LISTED, "default": DEFAULT_LISTED},
        }
    ]
}


class DocumentedAPI(FastAPI):
    """FastAPI with our schemas in its document, and the key on every route but the open ones."""

    def openapi(self) -> JSON:
        if self.openapi_schema is None:
            document = super().openapi()
            key = {"type": "http", "scheme": "bearer", "description": "Where the server has a key"}
            document["components"] = {"schemas": _schemas(), "securitySchemes": {"key": key}}
            for path, operations in document["paths"].items():
                for operation in operations.values():
                    operation["security"] = [] if path in OPEN_PATHS else [{"key": []}]
            self.openapi_schema = document
        return self.openapi_schema


def _schemas() -> JSON:
    _, found = models_json_schema([(model, "validation") for model in MODELS], ref_template=SCHEMA_REF)
    _, values = TypeAdapter.json_schemas(
        [(kind, "serialization", TypeAdapter(kind)) for kind in (RequestRecord, RequestList)],
        ref_template=SCHEMA_REF,
    )
    schemas = found["$defs"] | values["$defs"]
    for body in (CompletionBody, ChatBody):
        schemas[body.__name__]["properties"] |= {
            name: {"enum": list(values), "description": "Not supported; these values ask for nothing"}
            for name, values in NO_EFFECT.items()
        }
    return schemas
