"""An entry of `added_tokens` in tokenizer.json, for whoever reads that file."""

from __future__ import annotations

import msgspec


class AddedToken(msgspec.Struct, frozen=True):
    """A token beside the vocabulary that is looked for before a text is encoded.

    `normalized`: it is found in the normalized text; `lstrip`, `rstrip`: it takes the spaces before
    or after it; `single_word`: it counts between word boundaries only.
    """

    content: str
    id: int
    special: bool = False
    normalized: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
