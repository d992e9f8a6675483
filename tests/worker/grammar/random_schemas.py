"""Random JSON schemas: every keyword that is served, nested a few levels deep."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

_NAMES = ("a", "b c", "é", "id", '"', "\\", "name", "x-1")
_PATTERNS = ("^[a-c]{2,4}$", "^x.?$", "^.{0,3}y$", r"^\d+-\d+$", "^(up|down)$")
_FORMATS = ("date", "uuid", "ipv4", "time", "date-time")
_CONSTANTS = (0, -1.5, True, None, "é\n", "", ["a", {}], {"k": [1]})


def random_schema(rng: random.Random, *, depth: int = 3) -> Schema:
    """Return a schema that something satisfies; the same for the same state of `rng`."""
    kinds = [_string, _integer, _number, _fixed, _plain]
    if depth > 0:
        kinds += [_object, _object, _array, _union, _reference]
    return rng.choice(kinds)(rng, depth)


def _string(rng: random.Random, depth: int) -> Schema:
    schema: Schema = {"type": "string"}
    match rng.randrange(4):
        case 0:
            schema["minLength"] = rng.randrange(3)
            schema["maxLength"] = schema["minLength"] + rng.randrange(1, 6)
        case 1:
            schema["pattern"] = rng.choice(_PATTERNS)
        case 2:
            schema["format"] = rng.choice(_FORMATS)
    return schema


def _integer(rng: random.Random, depth: int) -> Schema:
    low = rng.randrange(-1000, 1000)
    bounds = {"minimum": low, "maximum": low + rng.randrange(5000)}
    if rng.random() < 0.3:
        return {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": rng.randrange(2, 9)}
    return {"type": "integer"} | {key: bounds[key] for key in bounds if rng.random() < 0.6}


def _number(rng: random.Random, depth: int) -> Schema:
    low = rng.randrange(-50, 50) / 4
    bounds = {"exclusiveMinimum": low, "maximum": low + rng.randrange(1, 100)}
    return {"type": "number"} | {key: bounds[key] for key in bounds if rng.random() < 0.6}


def _fixed(rng: random.Random, depth: int) -> Schema:
    if rng.random() < 0.5:
        return {"const": rng.choice(_CONSTANTS)}
    return {"enum": rng.sample(_CONSTANTS, rng.randrange(1, 4))}


def _plain(rng: random.Random, depth: int) -> Schema:
    return {"type": rng.choice(["boolean", "null", ["string", "null"], ["integer", "boolean"]])}


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(_NAMES, rng.randrange(4))
    schema: Schema = {
        "type": "object",
        "properties": {name: random_schema(rng, depth=depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
    }
    others = rng.randrange(3)
    if others:
        schema["additionalProperties"] = others == 1 and random_schema(rng, depth=0)
    return schema


def _array(rng: random.Random, depth: int) -> Schema:
    schema: Schema = {"type": "array", "items": random_schema(rng, depth=depth - 1)}
    if rng.random() < 0.3:
        schema["prefixItems"] = [random_schema(rng, depth=depth - 1) for _ in range(2)]
    if rng.random() < 0.6:
        schema["minItems"] = rng.randrange(3)
        schema["maxItems"] = schema["minItems"] + rng.randrange(3)
    return schema


def _union(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [random_schema(rng, depth=depth - 1) for _ in range(rng.randrange(1, 4))]}


def _reference(rng: random.Random, depth: int) -> Schema:
    """Return an object that may hold another of its own kind."""
    node = {
        "type": "object",
        "properties": {"value": random_schema(rng, depth=0), "next": {"$ref": "#/$defs/node"}},
        "required": ["value"],
        "additionalProperties": False,
    }
    if depth < 3:  # definitions stand at the root
        return random_schema(rng, depth=0)
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}
