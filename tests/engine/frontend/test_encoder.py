"""Tokenizer bundles and the encoder made of one."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from engine.frontend.encoder import Encoder
from engine.frontend.errors import RequestError
from engine.frontend.tokenizer_bundle import TokenizerBundle, load_bundle
from kvindex.foundation.errors import ConfigError
from tests.engine.frontend.tiny_tokenizer import (
    BOS_ID,
    CHAT_TEMPLATE,
    IM_END_ID,
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    tiny_bundle,
    write_model_folder,
)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(tiny_bundle())


def with_file(bundle: TokenizerBundle, name: str, content: object) -> TokenizerBundle:
    return TokenizerBundle(bundle.files | {name: json.dumps(content).encode()})


def test_a_bundle_survives_folder_and_wire(tmp_path: Path) -> None:
    bundle = tiny_bundle()
    assert load_bundle(write_model_folder(tmp_path / "model")) == bundle
    copy = msgspec.msgpack.decode(msgspec.msgpack.encode(bundle), type=TokenizerBundle)
    assert copy == bundle
    assert copy.digest == bundle.digest


def test_digests_tell_what_differs() -> None:
    bundle, other = tiny_bundle(), tiny_bundle(template="{{ 1 }}")
    assert other.tokenizer_digest == bundle.tokenizer_digest
    assert other.template_digest != bundle.template_digest
    assert other.digest != bundle.digest
    assert tiny_bundle(template=None).template_digest == ""


def test_the_template_file_outranks_the_configuration() -> None:
    bundle = tiny_bundle()
    with_template = TokenizerBundle(bundle.files | {"chat_template.jinja": b"own file"})
    assert bundle.chat_template == CHAT_TEMPLATE
    assert with_template.chat_template == "own file"


def test_the_default_one_of_named_templates_is_used() -> None:
    named = [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}]
    bundle = with_file(tiny_bundle(), "tokenizer_config.json", {"chat_template": named})
    assert bundle.chat_template == "D"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        load_bundle(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "tokenizer_config.json"])
def test_a_broken_file_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        Encoder(TokenizerBundle(tiny_bundle().files | {name: b"{broken"}))


def test_what_the_files_say_is_known(encoder: Encoder) -> None:
    assert encoder.special_tokens == {"bos_token": "<bos>", "eos_token": "<|im_end|>"}
    assert encoder.vocab_size == VOCAB_SIZE
    assert encoder.max_model_len == MAX_MODEL_LEN
    assert encoder.eos_token_ids == (IM_END_ID,)


def test_all_end_tokens_are_collected() -> None:
    bundle = with_file(tiny_bundle(), "generation_config.json", {"eos_token_id": [3, 5]})
    assert Encoder(bundle).eos_token_ids == (3, 5, IM_END_ID)
    bundle = with_file(tiny_bundle(), "generation_config.json", {})
    bundle = with_file(bundle, "config.json", {"eos_token_id": 9})
    assert Encoder(bundle).eos_token_ids == (9, IM_END_ID)


def test_special_tokens_are_added_only_on_request(encoder: Encoder) -> None:
    plain = encoder.encode("the", add_special_tokens=False)
    assert encoder.encode("the", add_special_tokens=True) == [BOS_ID, *plain]
    assert encoder.decode([BOS_ID, *plain]) == "the"
    assert encoder.decode([BOS_ID, *plain], skip_special_tokens=False) == "<bos>the"


def test_a_hopelessly_long_text_is_refused_before_it_is_tokenized(encoder: Encoder) -> None:
    longest = len("<|im_start|>")
    fits = "a" * (10 * longest)
    assert len(encoder.encode(fits, add_special_tokens=False, max_tokens=10)) == len(fits)
    with pytest.raises(RequestError) as caught:
        encoder.encode(fits + "a", add_special_tokens=False, max_tokens=10, param="messages")
    assert caught.value.kind == "context_length_exceeded"
    assert caught.value.param == "messages"


def test_encoding_releases_the_interpreter_lock(encoder: Encoder) -> None:
    text = "the lorem on " * 6_000
    ticks = 0
    done = threading.Event()

    def encode() -> None:
        encoder.encode(text, add_special_tokens=False)
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    while not done.is_set():
        ticks += 1
    thread.join()
    # Had the lock been held, this loop would have run a few times at most.
    assert ticks > 1000


def test_the_frontend_needs_no_torch_no_transformers_and_no_web_framework() -> None:
    names = "openai parse params encoder prompt output_fold sse tokenizer_bundle errors extension"
    code = (
        "import importlib, sys\n"
        f"for name in {names.split()!r}: importlib.import_module('engine.frontend.' + name)\n"
        "heavy = {'torch', 'transformers', 'aiohttp', 'numpy', 'redis', 'zmq'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    root = Path(__file__).parents[3]
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"
