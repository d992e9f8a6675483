"""Bodies: what the gateway reads of a client's, and what it sends to each kind of replica.

A body is kept as raw JSON per field, so a long prompt is never decoded on the event loop. What a
field means, and whether its value is in range, is engine.frontend's business.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from engine.frontend.errors import RequestError
from engine.frontend.extension import FleetExtension
from engine.frontend.openai import UNSEEN_INTERVAL
from engine.frontend.parse import invalid_field
from kvindex.registry import ReplicaKind

Endpoint = Literal["chat/completions", "completions"]
Fields = dict[str, msgspec.Raw]

FORBIDDEN = ("prefixfleet", "kv_transfer_params", "vllm_xargs")
"""Fields that only the gateway may set; a client that sends one is told so."""

_SHARED = (
    "model n max_tokens temperature top_p seed stop stream stream_options user logprobs "
    "frequency_penalty presence_penalty logit_bias"
)
_CHAT = (
    "messages max_completion_tokens tools tool_choice parallel_tool_calls response_format "
    "top_logprobs reasoning_effort modalities functions function_call verbosity prediction"
)
_COMPLETION = "prompt echo best_of suffix"
_VLLM = (
    "top_k min_p min_tokens repetition_penalty length_penalty ignore_eos stop_token_ids "
    "include_stop_str_in_output skip_special_tokens spaces_between_special_tokens "
    "add_generation_prompt continue_final_message add_special_tokens chat_template_kwargs "
    "structured_outputs return_token_ids prompt_logprobs allowed_token_ids bad_words "
    "truncate_prompt_tokens stream_interval"
)
_CONSUMED = frozenset(
    {
        "cache_salt",
        "metadata",
        "priority",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
    }
)
"""Fields that address the gateway, or nobody: accepted, and never sent to a foreign engine."""

ALLOWED: dict[Endpoint, frozenset[str]] = {
    "chat/completions": frozenset(f"{_SHARED} {_CHAT}".split()),
    "completions": frozenset(f"{_SHARED} {_COMPLETION}".split()),
}
VLLM_ALLOWED = frozenset(_VLLM.split())
_KNOWN = {endpoint: allowed | VLLM_ALLOWED | _CONSUMED for endpoint, allowed in ALLOWED.items()}


class StreamOptions(msgspec.Struct, frozen=True):
    """The stream options that change what the gateway relays."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Head(msgspec.Struct, frozen=True):
    """The fields that the gateway itself acts on, whatever the replica."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    priority: int | None = None

    @property
    def include_usage(self) -> bool:
        """Whether the client wants a usage chunk at the end of its stream."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def states_usage(self) -> bool:
        """Whether the client wants every chunk to state the usage so far."""
        return self.include_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )


_fields_decoder = msgspec.json.Decoder(Fields)
_head_decoder = msgspec.json.Decoder(Head)
_encoder = msgspec.json.Encoder()
_TRUE = msgspec.Raw(b"true")
_STREAM_OPTIONS = msgspec.Raw(b'{"include_usage":true}')
_CONTINUOUS = msgspec.Raw(b'{"include_usage":true,"continuous_usage_stats":true}')


def read_body(body: bytes) -> tuple[Head, Fields]:
    """Split a body into what the gateway acts on and its raw fields; raise RequestError."""
    try:
        fields = _fields_decoder.decode(body)
        head = _head_decoder.decode(body)
    except msgspec.ValidationError as error:
        raise invalid_field(error) from None
    except msgspec.DecodeError as error:
        reason = str(error).removeprefix("JSON is malformed: ")
        raise RequestError("invalid_request", f"the body is not valid JSON: {reason}") from None
    except RecursionError:
        raise RequestError("invalid_request", "the body is nested too deeply") from None
    for name in FORBIDDEN:
        if name in fields and bytes(fields.pop(name)) != b"null":
            raise _invalid(name, "is set by the gateway; leave it out")
    if head.cache_salt == "":
        raise _invalid("cache_salt", "must not be empty")
    return head, fields


def with_model(head: Head, fields: Fields, model: str) -> tuple[Head, Fields]:
    """Put the served model in the place of the name that the client gave."""
    if model == head.model:
        return head, fields
    replaced = {**fields, "model": msgspec.Raw(_encoder.encode(model))}
    return msgspec.structs.replace(head, model=model), replaced


def check_foreign(fields: Fields, endpoint: Endpoint) -> None:
    """Raise RequestError for a field that is not passed on to engines of other make."""
    known = _KNOWN[endpoint]
    for name in fields:
        if name not in known:
            raise _invalid(name, "is not a field that this gateway passes on; leave it out")


def body_for_ours(
    fields: Fields,
    extension: FleetExtension,
    *,
    prompts: list[list[int]] | None,
    stream: bool,
    states_usage: bool = False,
) -> bytes:
    """Make the body for a replica of ours: always a stream, always with usage.

    One that the client gets whole comes in fewer chunks. `prompts` replaces the prompts of a
    completion by their token ids where there are several; a single one travels in the extension.
    """
    sent: dict[str, Any] = {
        **fields,
        "stream": _TRUE,
        "stream_options": _CONTINUOUS if states_usage else _STREAM_OPTIONS,
        "prefixfleet": extension,
    }
    if not stream:
        sent["stream_interval"] = UNSEEN_INTERVAL
    for name in ("cache_salt", "priority"):
        sent.pop(name, None)
    if prompts is not None:
        sent["prompt"] = prompts
    return _encoder.encode(sent)


def body_for_foreign(
    fields: Fields, endpoint: Endpoint, kind: ReplicaKind, *, stream: bool, cache_salt: str
) -> bytes:
    """Make the body for a stock engine: allow-listed fields; a vLLM gets the cache salt too."""
    allowed = ALLOWED[endpoint] | (VLLM_ALLOWED if kind == "vllm" else frozenset())
    sent: dict[str, Any] = {name: value for name, value in fields.items() if name in allowed}
    if stream:
        sent["stream_options"] = _STREAM_OPTIONS
    if kind == "vllm":
        sent["cache_salt"] = cache_salt
    return _encoder.encode(sent)


def _invalid(param: str, problem: str) -> RequestError:
    return RequestError("invalid_request", f"{param}: {problem}", param=param)
