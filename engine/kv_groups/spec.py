"""The kinds of cache groups that an executor can declare; plain data.

Layers that keep the same part of the past form a group, with one block table per request. What a
group reads, frees and may share follows from its kind and is worked out in group.py. Sizes are in
tokens; a `block_size` of None is the engine's.
"""

from __future__ import annotations

import msgspec


class _Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every kind has."""

    block_size: int | None = None


class _Attention(_Spec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layers with one KV entry per token.

    `causal` False: entries depend on later tokens too, so they are valid for one request alone
    and this group is never cached; the executor computes its entries of a hit again. Layers above
    such a layer see the future through it: declare them so too. `drafter`: layers of a drafter
    (EAGLE, MTP), whose entries also depend on the next token.
    """

    causal: bool = True
    drafter: bool = False


class FullAttention(_Attention, frozen=True, kw_only=True, tag="full_attention"):
    """Every token reads all tokens before it."""


class SlidingWindow(_Attention, frozen=True, kw_only=True, tag="sliding_window"):
    """Every token reads the last `window` tokens, itself included."""

    window: int


class ChunkedLocal(_Attention, frozen=True, kw_only=True, tag="chunked_local"):
    """Every token reads the tokens since the last multiple of `chunk`."""

    chunk: int


class LinearState(_Spec, frozen=True, kw_only=True, tag="linear_state"):
    """A recurrent state (Mamba, linear attention) instead of entries per token.

    A block holds the state after its last token, or after the last token computed so far. The
    executor reads the state from the block of the last computed token and writes it to every
    block that the table names and the chunk reaches, at the block's end or at the chunk's.
    """


class CrossAttention(_Spec, frozen=True, kw_only=True, tag="cross_attention"):
    """Entries of an encoder's output: `num_tokens` of them, the same for the whole request.

    Never cached: the executor computes them whenever a request enters the batch.
    """

    num_tokens: int


KVGroupSpec = FullAttention | SlidingWindow | ChunkedLocal | LinearState | CrossAttention

ONE_FULL_ATTENTION_GROUP: tuple[KVGroupSpec, ...] = (FullAttention(),)
