"""The description of the API: complete, closed, and without what is the fleet's own."""

from __future__ import annotations

from typing import Any

from engine.frontend.errors import KINDS
from engine.frontend.openapi import GENERATION, ONE_MODEL, Operation, openapi_document
from engine.frontend.parse import HARMLESS, NEUTRAL

METRICS = Operation(method="get", path="/metrics", summary="Figures", is_text=True)
HEALTH = Operation(method="get", path="/health", summary="Life", needs_key=False, answers_503=True)
DOCUMENT = openapi_document(
    title="t", version="1", operations=(*GENERATION, ONE_MODEL, METRICS, HEALTH)
)


def operation(path: str, method: str = "post") -> dict[str, Any]:
    found: dict[str, Any] = DOCUMENT["paths"][path][method]
    return found


def references(value: object) -> set[str]:
    """Return the names of all schemas that a value refers to."""
    if isinstance(value, dict):
        own = {value["$ref"].rpartition("/")[2]} if "$ref" in value else set()
        return own.union(*map(references, value.values()))
    return set().union(*map(references, value)) if isinstance(value, list) else set()


def test_every_reference_leads_somewhere_and_nothing_is_there_for_nobody() -> None:
    assert references(DOCUMENT) == set(DOCUMENT["components"]["schemas"])


def test_the_fleets_own_field_is_not_described() -> None:
    for name, schema in DOCUMENT["components"]["schemas"].items():
        assert "prefixfleet" not in schema.get("properties", {}), name
    assert "FleetExtension" not in DOCUMENT["components"]["schemas"]


def test_every_accepted_field_is_described_and_no_other_is_allowed() -> None:
    schema = DOCUMENT["components"]["schemas"]["ChatCompletionRequest"]
    assert set(schema["properties"]) >= {*HARMLESS, *NEUTRAL, "messages", "tools", "top_k"}
    assert schema["additionalProperties"] is False
    responses = DOCUMENT["components"]["schemas"]["ResponsesBody"]
    assert "additionalProperties" not in responses  # Those of chat may be given too.


def test_streams_and_errors_are_described_with_their_answers() -> None:
    answers = operation("/v1/chat/completions")["responses"]
    assert set(answers["200"]["content"]) == {"application/json", "text/event-stream"}
    assert {int(status) for status in answers} == {200, *(k.status for k in KINDS.values())}
    assert operation("/v1/models", "get")["security"] == [{"key": []}]
    assert "security" not in operation("/health", "get")
    assert operation("/health", "get")["responses"]["503"]["description"] == "The same, not ready"
    assert set(operation("/metrics", "get")["responses"]["200"]["content"]) == {"text/plain"}


def test_a_path_with_a_name_in_it_has_that_parameter() -> None:
    one = operation("/v1/models/{model}", "get")
    assert [p["name"] for p in one["parameters"]] == ["model"]
    assert one["operationId"] == "get_v1_models_model"
