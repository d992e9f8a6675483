"""The files that turn text into token ids, as one value that travels from replica to gateway.

A bundle is bytes and digests; what the files mean is encoder.py and prompt.py. It deliberately
holds no weights, so a gateway needs no model folder.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from kvindex.foundation.errors import ConfigError

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
GENERATION_CONFIG_FILE = "generation_config.json"
MODEL_CONFIG_FILE = "config.json"

_REQUIRED = (TOKENIZER_FILE, MODEL_CONFIG_FILE)
_OPTIONAL = (TOKENIZER_CONFIG_FILE, TEMPLATE_FILE, GENERATION_CONFIG_FILE)


class TokenizerBundle(msgspec.Struct, frozen=True):
    """Tokenizer and prompt files of one model, by file name."""

    files: dict[str, bytes]

    @property
    def digest(self) -> str:
        """Sha256 hex over all names and contents: equal digests mean equal bundles."""
        whole = hashlib.sha256()
        for name in sorted(self.files):
            whole.update(hashlib.sha256(name.encode()).digest())
            whole.update(hashlib.sha256(self.files[name]).digest())
        return whole.hexdigest()

    @property
    def tokenizer_digest(self) -> str:
        """Sha256 hex of tokenizer.json."""
        return hashlib.sha256(self.files[TOKENIZER_FILE]).hexdigest()

    @property
    def template_digest(self) -> str:
        """Sha256 hex of the chat template's text, "" when the model has none."""
        template = self.chat_template
        return hashlib.sha256(template.encode()).hexdigest() if template is not None else ""

    @property
    def chat_template(self) -> str | None:
        """The default chat template: its own file outranks the tokenizer's configuration."""
        if TEMPLATE_FILE in self.files:
            return self.files[TEMPLATE_FILE].decode("utf-8")
        template = self.json(TOKENIZER_CONFIG_FILE).get("chat_template")
        if isinstance(template, list):
            named = {item.get("name"): item.get("template") for item in template}
            template = named.get("default")
        return template if isinstance(template, str) else None

    def json(self, name: str) -> dict[str, Any]:
        """Parse one file as a JSON object, {} if it is absent; raise ConfigError if malformed."""
        if name not in self.files:
            return {}
        try:
            value = msgspec.json.decode(self.files[name])
        except msgspec.DecodeError as error:
            raise ConfigError(f"{name}: not valid JSON: {error}") from None
        if not isinstance(value, dict):
            raise ConfigError(f"{name}: expected a JSON object, got {type(value).__name__}")
        return value


def load_bundle(folder: Path) -> TokenizerBundle:
    """Read a bundle from a model folder; raise ConfigError naming the file that is missing."""
    files: dict[str, bytes] = {}
    for name in (*_REQUIRED, *_OPTIONAL):
        path = folder / name
        if path.is_file():
            files[name] = path.read_bytes()
        elif name in _REQUIRED:
            raise ConfigError(f"model folder {folder} has no {name}; a Hugging Face folder has one")
    return TokenizerBundle(files)
