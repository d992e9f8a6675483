"""The root of every error that prefixfleet raises on purpose.

It knows no HTTP: the table kind -> status lives in engine/frontend/errors.py.
"""

from __future__ import annotations


class PrefixFleetError(Exception):
    """Raised, by way of its subclasses, when something fails in a way that we foresaw.

    `kind` is the stable name of the failure; `retry_after_s` is set when trying again may help.
    """

    kind: str = "internal"
    retry_after_s: float | None = None


class ConfigError(PrefixFleetError):
    """Raised when a setting cannot be used; the message names file, path and what is allowed."""

    kind = "config"


class DependencyError(PrefixFleetError):
    """Raised when something that we need from outside (Redis, a model, a port) is not there."""

    kind = "dependency"


class WireError(PrefixFleetError):
    """Raised when bytes from another process do not decode to what they claim to be."""

    kind = "wire"


class HashMismatchError(PrefixFleetError):
    """Raised when two parties disagree about the hash scheme or the model; names both values."""

    kind = "hash_mismatch"
