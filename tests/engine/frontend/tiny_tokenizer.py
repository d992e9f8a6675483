"""A tiny real tokenizer for tests: one token per byte, a few merges, ChatML-like specials.

Ids: 0-255 are the bytes, 256 up are merges, then the special tokens. Also writes a model folder
that holds everything but weights.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from engine.frontend.tokenizer_bundle import TokenizerBundle

MERGED = ("th", "the", "he", "in", "Ġt", "Ġthe", "Ġa", "er", "on", "lo", "Ġä")
_MERGES = (
    ("t", "h"),
    ("th", "e"),
    ("h", "e"),
    ("i", "n"),
    ("Ġ", "t"),
    ("Ġt", "he"),
    ("Ġ", "a"),
    ("e", "r"),
    ("o", "n"),
    ("l", "o"),
    ("Ġ", "ä"),  # a space and the first byte of 中 in one token, as real tokenizers have
)
SPECIALS = ("<bos>", "<|im_start|>", "<|im_end|>")
BOS_ID, IM_START_ID, IM_END_ID = (256 + len(MERGED) + i for i in range(3))
VOCAB_SIZE = 256 + len(MERGED) + len(SPECIALS)
MAX_MODEL_LEN = 512

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_alphabet() -> list[str]:
    """Return GPT-2's printable character of every byte, in byte order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable}
    names.update({byte: chr(256 + i) for i, byte in enumerate(others)})
    return [names[byte] for byte in range(256)]


def tiny_bundle(
    *,
    add_bos: bool = True,
    template: str | None = CHAT_TEMPLATE,
    vocab_size: int = VOCAB_SIZE,
    marks: tuple[str, ...] = (),
    special_marks: tuple[str, ...] = (),
) -> TokenizerBundle:
    """Build the bundle; `vocab_size` is what config.json claims, without the marks.

    `marks` are further tokens of their own; of these, `special_marks` are left out of texts.
    """
    vocab = {name: i for i, name in enumerate([*byte_alphabet(), *MERGED])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(_MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in marks])
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special_marks])
    vocab_size += len(marks) + len(special_marks)
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", BOS_ID)]
        )
    tokenizer_config = {
        "bos_token": "<bos>",
        "eos_token": {"content": "<|im_end|>"},
        "chat_template": template,
    }
    model_config = {"vocab_size": vocab_size, "max_position_embeddings": MAX_MODEL_LEN}
    return TokenizerBundle(
        {
            "tokenizer.json": tokenizer.to_str().encode(),
            "tokenizer_config.json": json.dumps(tokenizer_config).encode(),
            "generation_config.json": json.dumps({"eos_token_id": [IM_END_ID]}).encode(),
            "config.json": json.dumps(model_config).encode(),
        }
    )


def write_model_folder(folder: Path) -> Path:
    """Write the bundle as a model folder (without weights) and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in tiny_bundle().files.items():
        (folder / name).write_bytes(content)
    return folder
