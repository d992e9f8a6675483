"""The hash chain: one digest per full block, each covering everything before it.

H(block) = SHA-256(canonical CBOR of (parent, tokens, extra)), or the same over pickle bytes for
`sha256` engines; the chain equals vLLM's (reference vectors in tests/golden). It knows neither
who holds a block nor what the tokens mean.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import repeat
from operator import itemgetter
from typing import Literal, NewType

import msgspec

from kvindex.foundation.errors import HashMismatchError

BlockHash = NewType("BlockHash", bytes)
"""The 32-byte digest of a block and of all its ancestors."""

Algorithm = Literal["sha256_cbor", "sha256"]
ExtraKeys = tuple[tuple[str | int, ...], ...] | None

DEFAULT_SEED = "vllm-none-hash"


class HashScheme(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What two parties must agree on before a block hash of one means anything to the other."""

    algorithm: Algorithm = "sha256_cbor"
    seed: str = DEFAULT_SEED
    block_size: int = 16


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA adapter as the hash sees it: its name and the path it was loaded from."""

    name: str
    path: str


def cbor_uint(value: int, major: int = 0) -> bytes:
    """Encode a non-negative integer (or a length) as canonical CBOR, shortest form (RFC 8949)."""
    head = major << 5
    if value < 24:
        return bytes((head | value,))
    if value < 0x100:
        return bytes((head | 24, value))
    if value < 0x10000:
        return bytes((head | 25,)) + value.to_bytes(2, "big")
    if value < 0x100000000:
        return bytes((head | 26,)) + value.to_bytes(4, "big")
    return bytes((head | 27,)) + value.to_bytes(8, "big")


def canonical_cbor(value: object) -> bytes:
    """Encode None, text, bytes, integers and arrays of them, shortest form (RFC 8949).

    These are the types of extra keys and salts; anything else raises TypeError.
    """
    if value is None:
        return b"\xf6"
    if isinstance(value, str):
        data = value.encode("utf-8", "surrogatepass")
        return cbor_uint(len(data), 3) + data
    if isinstance(value, bytes):
        return cbor_uint(len(value), 2) + value
    if isinstance(value, (tuple, list)):
        return cbor_uint(len(value), 4) + b"".join(map(canonical_cbor, value))
    if isinstance(value, int):
        return cbor_uint(value) if value >= 0 else cbor_uint(-1 - value, 1)
    raise TypeError(f"no canonical form for {type(value).__name__}")


_TOKENS: list[bytes | None] = []
"""CBOR bytes by token id, None for those not met yet. Its upper half stays empty: a negative id,
which counts from the end, finds None as well."""

_MAX_IDS = 2**18
"""More than any vocabulary has; what lies above is encoded but not remembered."""


def _encode(tokens: Sequence[int]) -> Sequence[bytes | None]:
    """Look up the CBOR bytes of all tokens at once: a loop would take half of the time of hashing.

    IndexError, or None in its place, for a token that was not met yet.
    """
    return itemgetter(*tokens)(_TOKENS) if len(tokens) > 1 else (_TOKENS[tokens[0]],)


def _meet(tokens: Sequence[int]) -> Sequence[bytes | None]:
    """Return the CBOR bytes of tokens some of which are new; a negative one raises ValueError."""
    ids = [*map(int, tokens)]
    lowest, highest = min(ids), max(ids)
    if lowest < 0:
        raise ValueError(f"token id {lowest} is negative")
    if highest >= _MAX_IDS:
        return [*map(cbor_uint, ids)]
    _TOKENS.extend([None] * ((2 << highest.bit_length()) - len(_TOKENS)))
    for token in set(ids):
        if _TOKENS[token] is None:
            _TOKENS[token] = cbor_uint(token)
    return _encode(ids)


_BEFORE_DIGEST = hashlib.sha256(b"\x83" + cbor_uint(32, 2))
"""Has taken in what stands before the digest of a parent. To copy it costs less than a new one."""


def _sha256_pickle(value: object) -> BlockHash:
    return BlockHash(hashlib.sha256(pickle.dumps(value, protocol=5)).digest())


@lru_cache(maxsize=64)
def root_hash(scheme: HashScheme) -> BlockHash:
    """Return the parent of every first block: the hash of the serialised seed string."""
    if scheme.algorithm == "sha256":
        return _sha256_pickle(scheme.seed)
    return BlockHash(hashlib.sha256(canonical_cbor(scheme.seed)).digest())


def extra_keys(
    *, first_block: bool, cache_salt: str | None = None, adapter: Adapter | None = None
) -> ExtraKeys:
    """Build the tagged extra keys of a block, in the order lora, cache_salt (first block only)."""
    keys: list[tuple[str | int, ...]] = []
    if adapter is not None:
        keys.append(("lora", adapter.name, adapter.path))
    if first_block and cache_salt:
        keys.append(("cache_salt", cache_salt))
    return tuple(keys) or None


def hash_block(
    algorithm: Algorithm, parent: bytes, tokens: Sequence[int], extra: ExtraKeys
) -> BlockHash:
    """Hash one full block; tokens of any integer type give the same digest."""
    if algorithm == "sha256":
        return _sha256_pickle((parent, tuple(map(int, tokens)), extra))
    return _chain_cbor(parent, tokens, len(tokens), extra)[0]


def _join(encoded: Sequence[bytes | None], block_size: int, tail: bytes) -> Iterator[bytes]:
    """Yield what each block hashes behind its parent; TypeError where an encoding is None."""
    each, head = iter(encoded), cbor_uint(block_size, 4)
    per_block = zip(repeat(head), *[each] * block_size, repeat(tail), strict=False)
    return map(b"".join, per_block)


def _chain_cbor(
    parent: bytes, tokens: Sequence[int], block_size: int, extra: ExtraKeys
) -> list[BlockHash]:
    """Hash consecutive full blocks that share their extra keys.

    Must hold: `tokens` is a whole number of blocks, none negative. Token encodings are looked
    up and joined block by block without a line of Python in between; what is left is a SHA-256 per
    block.
    """
    if not tokens:
        return []
    tail = canonical_cbor(extra)
    try:
        first, *rest = _join(_encode(tokens), block_size, tail)
    except (IndexError, TypeError):
        first, *rest = _join(_meet(tokens), block_size, tail)
    head = b"\x83" + cbor_uint(len(parent), 2) + parent
    parent = hashlib.sha256(head + first).digest()
    hashes = [parent]
    new_hasher, add = _BEFORE_DIGEST.copy, hashes.append
    for block in rest:
        hasher = new_hasher()
        hasher.update(parent)
        hasher.update(block)
        parent = hasher.digest()
        add(parent)
    return hashes  # type: ignore[return-value]  # a call of BlockHash per block would cost 5 %


class HashChain:
    """The growing list of block hashes of one request.

    Hashes cover full blocks only; `extend` may be called after every appended token and costs
    nothing until a block is full. The token list is the caller's and is only read.
    """

    __slots__ = ("_adapter", "_cache_salt", "_root", "_scheme", "hashes")

    def __init__(
        self, scheme: HashScheme, *, cache_salt: str | None = None, adapter: Adapter | None = None
    ) -> None:
        self._scheme = scheme
        self._cache_salt = cache_salt
        self._adapter = adapter
        self._root = root_hash(scheme)
        self.hashes: list[BlockHash] = []

    @property
    def block_size(self) -> int:
        """Tokens per hash."""
        return self._scheme.block_size

    def extend(self, tokens: Sequence[int]) -> None:
        """Hash every block of `tokens` that is full and not hashed yet."""
        size, hashes = self._scheme.block_size, self.hashes
        num_full = len(tokens) // size
        if len(hashes) >= num_full:
            return
        if not hashes:
            first = extra_keys(first_block=True, cache_salt=self._cache_salt, adapter=self._adapter)
            hashes.extend(self._hash(self._root, tokens[:size], first))
        if len(hashes) < num_full:
            later = extra_keys(first_block=False, adapter=self._adapter)
            rest = tokens[len(hashes) * size : num_full * size]
            hashes.extend(self._hash(hashes[-1], rest, later))

    def _hash(self, parent: bytes, tokens: Sequence[int], extra: ExtraKeys) -> list[BlockHash]:
        """Hash consecutive full blocks that share their extra keys."""
        size = self._scheme.block_size
        if self._scheme.algorithm == "sha256_cbor":
            return _chain_cbor(parent, tokens, size, extra)
        hashes = []
        for start in range(0, len(tokens), size):
            block = tokens[start : start + size]
            parent = hash_block("sha256", parent, block, extra)
            hashes.append(BlockHash(parent))
        return hashes


def hash_tokens(
    tokens: Sequence[int],
    scheme: HashScheme,
    *,
    cache_salt: str | None = None,
    adapter: Adapter | None = None,
) -> list[BlockHash]:
    """Return the hashes of all full blocks of `tokens`; O(len(tokens))."""
    chain = HashChain(scheme, cache_salt=cache_salt, adapter=adapter)
    chain.extend(tokens)
    return chain.hashes


def known_answer(scheme: HashScheme) -> BlockHash:
    """Hash a fixed prompt of one block: two parties with equal answers run the same code path."""
    tokens = [token % 16 for token in range(scheme.block_size)]
    return hash_tokens(tokens, scheme)[0]


def short_hash(block_hash: bytes) -> int:
    """Return the last 8 bytes as an unsigned integer, the form that vLLM publishes."""
    return int.from_bytes(block_hash[-8:], "big")


def require_same_scheme(ours: HashScheme, theirs: HashScheme, *, party: str) -> None:
    """Raise HashMismatchError, naming field and both values, unless the schemes are equal."""
    for field in HashScheme.__struct_fields__:
        mine, other = getattr(ours, field), getattr(theirs, field)
        if mine != other:
            raise HashMismatchError(
                f"{party} hashes with {field}={other!r}, this pool with {field}={mine!r}"
            )
