"""The HTTP API as an OpenAPI 3.1 document: one table of routes, and the models that parse their bodies."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping, Sequence
from importlib import resources
from itertools import pairwise
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from tandem_gateway.dialects import chat_dialect, messages_models, openai_models, responses_models
from tandem_gateway.dialects.messages_models import CountBody, MessagesBody
from tandem_gateway.dialects.openai_models import ChatBody, CompletionBody
from tandem_gateway.dialects.responses_models import ResponsesBody
from tandem_gateway.edge import tokenize_api
from tandem_gateway.edge.tokenize_api import DetokenizeBody, TokenizeBody


class Route(NamedTuple):
    method: str
    path: str
    group: str
    summary: str
    body: type[BaseModel] | None = None
    #: Content type of a successful answer.
    content: str = "application/json"
    needs_key: bool = True
    #: Whether it accepts the headers of requests for answers.
    answers: bool = False


_STREAMS = "application/json, or with stream: true text/event-stream"
ROUTES = (
    Route("post", "/v1/chat/completions", "Answers", "Answers a conversation.", ChatBody, _STREAMS,
          answers=True),
    Route("post", "/v1/completions", "Answers", "Continues a text or token ids.", CompletionBody, _STREAMS,
          answers=True),
    Route("post", "/v1/responses", "Answers", "Answers as OpenAI's Responses API; nothing is stored.",
          ResponsesBody, _STREAMS, answers=True),
    Route("post", "/v1/messages", "Answers", "Answers as Anthropic's Messages API.", MessagesBody, _STREAMS,
          answers=True),
    Route("get", "/v1/models", "Models", "The served model, with its limits."),
    Route("get", "/v1/models/{model}", "Models", "One model; 404 for another one."),
    Route("post", "/v1/messages/count_tokens", "Tokens", "Number of tokens of a body of /v1/messages.",
          CountBody),
    Route("post", "/tokenize", "Tokens", "Token ids of a prompt or of messages.", TokenizeBody),
    Route("post", "/detokenize", "Tokens", "The text of token ids.", DetokenizeBody),
    Route("get", "/health", "State", "200 while requests are accepted, else 503 with a retry-after.",
          needs_key=False),
    Route("get", "/ping", "State", "An alias of /health.", needs_key=False),
    Route("get", "/version", "State", "The version of Tandem.", needs_key=False),
    Route("get", "/metrics", "State", "Metrics for Prometheus; an operator's key.", content="text/plain"),
    Route("get", "/fleet", "State", "The pods and their load."),
    Route("get", "/dashboard/", "Pages", "What the system does, live; its data need an operator's key.",
          content="text/html", needs_key=False),
    Route("get", "/docs", "Pages", "This API for people.", content="text/html", needs_key=False),
    Route("get", "/openapi.json", "Pages", "This API for programs.", needs_key=False),
)  # fmt: skip

_ANSWER_HEADERS: Mapping[str, str] = {
    "x-slo-class": "SLO class of the request, as slo_class in the body.",
    "x-slo-ttft-ms": "Objective of this request: milliseconds to the first token.",
    "x-slo-tpot-ms": "Objective: milliseconds per further token.",
    "x-slo-e2e-ms": "Objective: milliseconds to the end.",
    "x-slo-strict": "true: refuse the request rather than serve it later than its objectives.",
    "x-request-id": "Id of the request in logs and receipts; made if it is missing.",
    "idempotency-key": "A request with the same key and body gets the answer of the first one.",
    "x-event-ids": "true: the stream's events have ids, so that it can be resumed.",
    "last-event-id": "Resumes the stream after this event; the body is not read.",
}
_MODELS = (openai_models, chat_dialect, messages_models, responses_models, tokenize_api)
_PROTOS = ("gateway", "common")
_MESSAGES = ("ChatRequest", "GenerateRequest", "SamplingParams", "BeamSearch")
_ERRORS = {
    "400": "The request is wrong; `param` names the field.",
    "401": "The API key is missing or unknown.",
    "404": "The model, or the answer to be resumed, is not here.",
    "413": "The body is over the limit.",
    "429": "Refused for now; retry-after: when to try again, x-refusal-reason: why.",
    "503": "No decode pod is available, or the gateway is stopping; retry-after: when to try again.",
}


def openapi_document(version: str, *, requires_keys: bool) -> dict[str, Any]:
    bodies = [route.body for route in ROUTES if route.body is not None]
    names, definitions = models_json_schema(
        [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
    )
    _describe(definitions.get("$defs", {}), bodies)
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        schema = names[(route.body, "validation")] if route.body is not None else None
        paths.setdefault(route.path, {})[route.method] = _operation(route, schema, requires_keys)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tandem",
            "version": version,
            "summary": "OpenAI's HTTP API, served by separate prefill and decode pods.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": {
                **definitions.get("$defs", {}),
                "Error": {
                    "type": "object",
                    "properties": {
                        "error": {
                            "type": "object",
                            "properties": {
                                "message": {"type": "string"},
                                "type": {"type": "string"},
                                "param": {"type": ["string", "null"]},
                                "code": {"type": ["string", "null"]},
                            },
                        }
                    },
                },
            },
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _describe(schemas: Mapping[str, dict[str, Any]], bodies: Sequence[type[BaseModel]]) -> None:
    """Adds the docstrings of the models' fields. Fields of gRPC's requests have the same names, and their
    comments from the .proto files, which are in the stubs."""
    stubs = resources.files("tandem_proto.v1")
    of_models = [inspect.getsource(module) for module in _MODELS]
    of_protos = [stubs.joinpath(f"{name}_pb2.pyi").read_text(encoding="utf-8") for name in _PROTOS]
    texts = {
        node.name: _texts_of(node)
        for source in (*of_protos, *of_models)
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
    }
    bases = {body.__name__: [base.__name__ for base in body.__mro__] for body in bodies}
    for name, schema in schemas.items():
        classes = [*bases[name], *_MESSAGES] if name in bases else [name]
        sources = [texts.get(one, {}) for one in classes]
        for field, shown in schema.get("properties", {}).items():
            shown.pop("title", None)
            description = next((source[field] for source in sources if field in source), None)
            if description is not None:
                shown["description"] = description


def _texts_of(message: ast.ClassDef) -> dict[str, str]:
    """The docstring of each field."""
    texts = {}
    for field, following in pairwise([*message.body, ast.Pass()]):
        match field, following:
            case ast.FunctionDef(name=name), _:  # a list or a map
                text = ast.get_docstring(field)
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                pass
            case _:
                continue
        if text:
            texts[name] = " ".join(text.split())
    return texts


def _operation(route: Route, schema: Mapping[str, Any] | None, requires_keys: bool) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": route.summary,
        "tags": [route.group],
        "operationId": f"{route.method}_{route.path.strip('/').replace('/', '_') or 'index'}",
        "responses": {"200": {"description": "OK", "content": _content(route)}},
    }
    if "{model}" in route.path:
        parameter = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [parameter]
    if route.answers:
        operation["parameters"] = [
            {"name": name, "in": "header", "description": text, "schema": {"type": "string"}}
            for name, text in _ANSWER_HEADERS.items()
        ]
    if schema is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
        operation["responses"] |= {
            status: {"description": text, "content": error} for status, text in _ERRORS.items()
        }
    if route.needs_key and requires_keys:
        operation["security"] = [{"key": []}, {"x-api-key": []}]
    return operation


def _content(route: Route) -> dict[str, Any]:
    if route.content == _STREAMS:
        return {"application/json": {}, "text/event-stream": {}}
    return {route.content: {}}
