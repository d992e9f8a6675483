"""Who is in the fleet: signed replica records, and the pool that a record belongs to.

Load, trust mode and liveness are not here but in the index (`LoadReport`, leases): a record says
what a replica is, not how it does. It knows no HTTP.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Literal, Protocol

import msgspec

from kvindex.foundation.errors import HashMismatchError, WireError
from kvindex.hashing import HashScheme, known_answer, require_same_scheme

ReplicaKind = Literal["prefixfleet", "vllm", "openai"]


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What makes two replicas serve the same tokens for the same text.

    Digests are sha256 hex of the tokenizer file and of the chat template; "" when unknown.
    """

    model: str
    revision: str = ""
    tokenizer_digest: str = ""
    template_digest: str = ""


class ServedAdapter(msgspec.Struct, frozen=True):
    """A LoRA adapter that a replica serves as a model name; `digest` "" where it does not tell."""

    name: str
    path: str
    digest: str = ""


class ReplicaRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One replica, as it describes itself at registration.

    `hit_granularity`: its hits are multiples of so many tokens, None for the pool's block size.
    """

    id: str
    kind: ReplicaKind
    url: str
    epoch: int
    served_models: tuple[str, ...]
    identity: ModelIdentity
    hash_scheme: HashScheme
    known_answer: bytes
    execution_digest: str = ""
    num_blocks: int = 0
    max_model_len: int = 0
    dp_size: int = 1
    hit_granularity: int | None = None
    adapters: tuple[ServedAdapter, ...] = ()


def pool_id(served_model: str, identity: ModelIdentity, scheme: HashScheme) -> str:
    """Name the pool of replicas that share one index; 16 hex digits of a digest of all three."""
    packed = msgspec.msgpack.encode((served_model, identity, scheme))
    return hashlib.sha256(packed).hexdigest()[:16]


def check_record(record: ReplicaRecord, identity: ModelIdentity, scheme: HashScheme) -> None:
    """Raise HashMismatchError, naming field and both values, unless the record fits the pool."""
    party = f"replica {record.id}"
    require_same_scheme(scheme, record.hash_scheme, party=party)
    for field in ModelIdentity.__struct_fields__:
        mine, other = getattr(identity, field), getattr(record.identity, field)
        if mine != other:
            raise HashMismatchError(f"{party} has {field}={other!r}, this pool {field}={mine!r}")
    expected = known_answer(scheme)
    if record.known_answer != expected:
        raise HashMismatchError(
            f"{party} hashes the known prompt to {record.known_answer.hex()}, "
            f"this pool to {expected.hex()}"
        )


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ReplicaRecord)
_SIGNATURE_BYTES = 32


def sign_record(record: ReplicaRecord, secret: bytes) -> bytes:
    """Serialise a record under an HMAC-SHA256 signature."""
    packed = _encoder.encode(record)
    return hmac.digest(secret, packed, "sha256") + packed


def verify_record(blob: bytes, secret: bytes) -> ReplicaRecord:
    """Parse a signed record; raise WireError when the signature or the content is wrong."""
    signature, packed = blob[:_SIGNATURE_BYTES], blob[_SIGNATURE_BYTES:]
    if not hmac.compare_digest(signature, hmac.digest(secret, packed, "sha256")):
        raise WireError("replica record: wrong signature (another fleet secret?)")
    try:
        return _decoder.decode(packed)
    except msgspec.DecodeError as error:
        raise WireError(f"replica record: {error}") from None


class Registry(Protocol):
    """The list of replica records; every method raises DependencyError when unreachable."""

    async def publish(self, record: ReplicaRecord, *, lease_s: float) -> None:
        """Write or refresh a record; it disappears when not refreshed for `lease_s`."""
        ...

    async def withdraw(self, replica_id: str) -> None:
        """Remove a record at once."""
        ...

    async def records(self) -> list[ReplicaRecord]:
        """List the verified records; forged or unreadable ones are logged and left out."""
        ...

    async def close(self) -> None:
        """Release connections."""
        ...


class FleetRegistry(Registry, Protocol):
    """Who is in the fleet, and who does what only one process of it may."""

    async def claim(self, name: str, owner: str, *, lease_s: float) -> bool:
        """Take a task that only one process may do, or keep it; False while another has it."""
        ...

    async def unclaim(self, name: str, owner: str) -> None:
        """Give a task back; what another has stays with it."""
        ...
