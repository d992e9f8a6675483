"""The OpenAPI description of what a client may send, generated from the Structs that read it.

Gateway and replica list their operations; shapes, errors and accepted fields are said once here.
It knows no HTTP framework.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from engine.frontend.errors import KINDS, ErrorEnvelope
from engine.frontend.openai import (
    ChatCompletion,
    ChatCompletionRequest,
    Completion,
    CompletionRequest,
    ModelCard,
    ModelList,
)
from engine.frontend.parse import HARMLESS, NEUTRAL
from engine.frontend.responses_request import ResponsesBody
from engine.frontend.tokenize import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
)

Json = dict[str, Any]

_REF = "#/components/schemas/{name}"
_FLEET_ONLY = "prefixfleet"
"""The field by which a gateway speaks to its replicas; no client may send it."""

_RESPONSE: Json = {
    "title": "Response",
    "description": "An answer of POST /v1/responses, as OpenAI's reference describes it.",
    "type": "object",
    "required": ["id", "object", "created_at", "status", "model", "output", "usage"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "response"},
        "created_at": {"type": "integer"},
        "status": {"enum": ["completed", "incomplete", "failed", "in_progress"]},
        "model": {"type": "string"},
        "output": {"type": "array", "items": {"type": "object"}},
        "usage": {"type": ["object", "null"]},
    },
}


_EVENT: Json = {
    "type": "object",
    "description": "One server-sent event; `data` is JSON, or [DONE] at the end.",
    "required": ["data"],
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
}


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One method of one path.

    `answer` is the type of a 200, None for JSON of no fixed shape. `may_stream`: with
    `stream: true` the answer is a stream of server-sent events. `answers_503`: in the same shape.
    """

    method: Literal["get", "post"]
    path: str
    summary: str
    body: type[msgspec.Struct] | None = None
    answer: type[msgspec.Struct] | None = None
    answer_name: str | None = None
    may_stream: bool = False
    needs_key: bool = True
    answers_503: bool = False
    is_text: bool = False


GENERATION = (
    Operation(
        method="post",
        path="/v1/chat/completions",
        summary="Answer a conversation",
        body=ChatCompletionRequest,
        answer=ChatCompletion,
        may_stream=True,
    ),
    Operation(
        method="post",
        path="/v1/completions",
        summary="Continue texts or token ids",
        body=CompletionRequest,
        answer=Completion,
        may_stream=True,
    ),
    Operation(
        method="post",
        path="/v1/responses",
        summary="Answer an input, nothing stored",
        body=ResponsesBody,
        answer_name="Response",
        may_stream=True,
    ),
    Operation(method="get", path="/v1/models", summary="List the models", answer=ModelList),
    Operation(
        method="post",
        path="/tokenize",
        summary="Turn a text or conversation into token ids",
        body=TokenizeRequest,
        answer=TokenizeAnswer,
    ),
    Operation(
        method="post",
        path="/detokenize",
        summary="Turn token ids into text",
        body=DetokenizeRequest,
        answer=DetokenizeAnswer,
    ),
)
"""What gateway and replica have in common."""

ONE_MODEL = Operation(
    method="get", path="/v1/models/{model}", summary="Describe one model", answer=ModelCard
)


def openapi_document(*, title: str, version: str, operations: Sequence[Operation]) -> Json:
    """Return the whole description as plain JSON values."""
    paths: dict[str, Json] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": paths,
        "components": {
            "schemas": _reachable(_schemas(operations), paths),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _schemas(operations: Sequence[Operation]) -> dict[str, Json]:
    types: list[Any] = [ErrorEnvelope]
    types += [o.body for o in operations if o.body is not None]
    types += [o.answer for o in operations if o.answer is not None]
    _, schemas = msgspec.json.schema_components(types, ref_template=_REF)
    for schema in schemas.values():
        schema.get("properties", {}).pop(_FLEET_ONLY, None)
    for name in ("ChatCompletionRequest", "CompletionRequest", "ResponsesBody"):
        _open_up(schemas[name], closed=name != "ResponsesBody")
    schemas["Response"] = _RESPONSE
    return schemas


def _reachable(schemas: dict[str, Json], paths: Json) -> dict[str, Json]:
    """Leave out what nothing refers to any more."""
    found: dict[str, Json] = {}
    texts = [msgspec.json.encode(paths).decode()]
    while texts:
        text = texts.pop()
        for name in sorted(schemas.keys() - found.keys()):
            if f'"{_REF.format(name=name)}"' in text:
                found[name] = schemas[name]
                texts.append(msgspec.json.encode(schemas[name]).decode())
    return dict(sorted(found.items()))


def _open_up(schema: Json, *, closed: bool) -> None:
    """Add the fields that are accepted without being read."""
    properties: Json = schema["properties"]
    for name in sorted(HARMLESS):
        properties.setdefault(name, {"description": "Accepted; has no effect."})
    for name, values in sorted(NEUTRAL.items()):
        properties.setdefault(name, {"enum": [None, *values], "description": "No other value."})
    if not closed:
        schema.pop("additionalProperties", None)


def _operation(operation: Operation) -> Json:
    described: Json = {
        "summary": operation.summary,
        "operationId": _operation_id(operation),
        "responses": _responses(operation),
    }
    if operation.needs_key:
        described["security"] = [{"key": []}]
    if "{" in operation.path:
        name = operation.path.partition("{")[2].rstrip("}")
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": _json(_ref_of(operation.body))}
    return described


def _responses(operation: Operation) -> Json:
    content = _answer_content(operation)
    responses: Json = {"200": {"description": "The answer", "content": content}}
    for status in sorted({shape.status for shape in KINDS.values()}):
        known = [kind for kind, shape in KINDS.items() if shape.status == status]
        responses[str(status)] = {
            "description": ", ".join(known),
            "content": _json({"$ref": _REF.format(name="ErrorEnvelope")}),
        }
    if operation.answers_503:
        responses["503"] = {"description": "The same, not ready", "content": content}
    return responses


def _answer_content(operation: Operation) -> Json:
    if operation.is_text:
        return {"text/plain": {"schema": {"type": "string"}}}
    schema: Json = {}
    if operation.answer is not None:
        schema = _ref_of(operation.answer)
    elif operation.answer_name is not None:
        schema = {"$ref": _REF.format(name=operation.answer_name)}
    content = _json(schema)
    if operation.may_stream:
        content["text/event-stream"] = {"schema": _EVENT}
    return content


def _json(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}


def _ref_of(kind: type[msgspec.Struct]) -> Json:
    return {"$ref": _REF.format(name=kind.__name__)}


def _operation_id(operation: Operation) -> str:
    words: Iterable[str] = operation.path.replace("{", "").replace("}", "").split("/")
    return "_".join([operation.method, *filter(None, words)])
