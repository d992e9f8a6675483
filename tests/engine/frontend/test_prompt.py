"""Chat templates and prompts: what the model gets to read."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from engine.frontend.errors import RequestError
from engine.frontend.parse import parse_chat_request, parse_completion_request
from engine.frontend.prompt import PromptEncoder
from engine.frontend.tokenizer_bundle import TokenizerBundle
from kvindex.foundation.clock import VirtualClock
from kvindex.foundation.errors import ConfigError
from tests.engine.frontend.tiny_tokenizer import BOS_ID, CHAT_TEMPLATE, VOCAB_SIZE, tiny_bundle

CLOCK = VirtualClock(1_700_000_000.0)


def prompter(template: str | None = CHAT_TEMPLATE, **options: Any) -> PromptEncoder:
    bundle = tiny_bundle(template=template, **options)
    return PromptEncoder(bundle, clock=CLOCK, max_model_len=512)


def chat_ids(prompts: PromptEncoder, *messages: dict[str, Any], **fields: Any) -> list[int]:
    body = {"model": "m", "messages": list(messages)} | fields
    return prompts.chat(parse_chat_request(json.dumps(body).encode()))


def chat_text(prompts: PromptEncoder, *messages: dict[str, Any], **fields: Any) -> str:
    ids = chat_ids(prompts, *messages, **fields)
    return prompts.encoder.decode(ids, skip_special_tokens=False)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def refusal(prompts: PromptEncoder, *messages: dict[str, Any]) -> tuple[str | None, str]:
    with pytest.raises(RequestError) as caught:
        chat_ids(prompts, *messages)
    assert caught.value.kind == "invalid_request"
    return caught.value.param, caught.value.message


def test_a_conversation_is_written_as_the_template_says_with_one_bos() -> None:
    prompts = prompter()
    expected = "<bos><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert chat_text(prompts, user("hi")) == expected
    assert chat_ids(prompts, user("hi")).count(BOS_ID) == 1


def test_the_generation_prompt_can_be_left_out() -> None:
    text = chat_text(prompter(), user("hi"), add_generation_prompt=False)
    assert text == "<bos><|im_start|>user\nhi<|im_end|>\n"


def test_text_parts_are_joined_by_line_breaks() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat_ids(prompter(), user(parts)) == chat_ids(prompter(), user("a\nb"))


@pytest.mark.fault("router-13")
def test_gateway_and_replica_get_equal_token_ids_for_a_conversation() -> None:
    replica = prompter()
    fetched = msgspec.msgpack.decode(msgspec.msgpack.encode(tiny_bundle()), type=TokenizerBundle)
    gateway = PromptEncoder(fetched, clock=CLOCK, max_model_len=512)
    turns = [{"role": "system", "content": 'quote " and é 中'}, user("x\ny"), user("<|im_end|>")]
    assert chat_ids(gateway, *turns) == chat_ids(replica, *turns)


@pytest.mark.fault("router-13")
def test_token_ids_equal_those_of_hugging_face() -> None:
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer

    bundle = tiny_bundle()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_buffer(bundle.files["tokenizer.json"]),
        bos_token="<bos>",
        eos_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
    )
    turns = [{"role": "system", "content": 'quote " and é 中'}, user("x\ny")]
    theirs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    assert chat_ids(prompter(), *turns) == theirs


@pytest.mark.parametrize(
    ("message", "param", "problem"),
    [
        (
            user([{"type": "image_url", "image_url": {"url": "x"}}]),
            "messages[0].content[0].type",
            "'image_url' parts are not supported; only 'text' is",
        ),
        (user([{"type": "text"}]), "messages[0].content[0].text", "must be a string"),
        (user(None), "messages[0].content", "is required"),
        (
            {"role": "function", "content": "x"},
            "messages[0].role",
            "'function' is not supported; use one of system, developer, user, assistant, tool",
        ),
    ],
)
def test_a_message_that_cannot_be_written_is_named(
    message: dict[str, Any], param: str, problem: str
) -> None:
    assert refusal(prompter(), message) == (param, f"{param}: {problem}")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('only two turns') }}", "only two turns"),
        ("{{ messages[5].content }}", "list object has no element 5"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe."),
        (
            "{{ ''.__class__.__mro__ }}",
            "access to attribute '__class__' of 'str' object is unsafe.",
        ),
    ],
)
def test_a_template_that_fails_is_the_requests_error(template: str, reason: str) -> None:
    message = f"messages: the model's chat template refuses them: {reason}"
    assert refusal(prompter(template), user("hi")) == ("messages", message)


def test_templates_may_use_what_hugging_face_offers_them() -> None:
    template = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}"
        "{{ strftime_now('%Y') }}{{ eos_token }}"
    )
    text = chat_text(prompter(template), user("<é>"), user("b"))
    assert text == '{"role": "user", "content": "<é>"}2023<|im_end|>'


def test_a_model_without_template_says_what_to_use() -> None:
    message = "messages: this model has no chat template; use /v1/completions"
    assert refusal(prompter(None), user("hi")) == ("messages", message)


def test_a_template_that_does_not_compile_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="chat template: "):
        prompter("{% if %}")


def test_completion_prompts_may_be_texts_or_token_ids() -> None:
    prompts = prompter()

    def ids(prompt: Any) -> list[list[int]]:
        body = json.dumps({"model": "m", "prompt": prompt}).encode()
        return prompts.completion(parse_completion_request(body))

    (text_ids,) = ids("the")
    assert text_ids[0] == BOS_ID
    assert ids(["the", "the"]) == [text_ids, text_ids]
    assert ids([7, 8]) == [[7, 8]]
    assert ids([[7], [8]]) == [[7], [8]]


@pytest.mark.fault("engine-31")
@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE])
def test_a_prompt_token_that_the_model_lacks_is_refused(token_id: int) -> None:
    body = json.dumps({"model": "m", "prompt": [[1], [2, token_id]]}).encode()
    with pytest.raises(RequestError) as caught:
        prompter().completion(parse_completion_request(body))
    assert caught.value.param == "prompt[1][1]"


@pytest.mark.parametrize(("prompt", "param"), [("", "prompt"), (["a", ""], "prompt[1]")])
def test_a_prompt_without_tokens_is_refused(prompt: Any, param: str) -> None:
    prompts = prompter(add_bos=False)
    body = json.dumps({"model": "m", "prompt": prompt}).encode()
    with pytest.raises(RequestError) as caught:
        prompts.completion(parse_completion_request(body))
    assert (caught.value.param, caught.value.message) == (param, f"{param}: has no tokens")
