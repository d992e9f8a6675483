"""How a config.json describes rotary embeddings: plain or scaled, one or two of them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from kvindex.foundation.errors import ConfigError
from worker.model.config_fields import ConfigFields

RopeKind = Literal["default", "linear", "llama3", "none"]
_LOCAL_THETA = 10_000.0


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding; `factor` and what follows only matter to a scaled `kind`.

    `none` leaves queries and keys as they are.
    """

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


def read_rope(fields: ConfigFields, max_position: int) -> RopeConfig:
    """Read both spellings: rope_theta beside rope_scaling, and the newer rope_parameters."""
    parameters = fields.raw.get("rope_parameters") or {}
    section = {
        **(fields.raw.get("rope_scaling") or {}),
        **parameters.get("full_attention", parameters),
    }
    return _rope(ConfigFields(fields.path, section), fields, max_position)


def read_local_rope(fields: ConfigFields, max_position: int) -> RopeConfig:
    """Read the rotary embedding of the windowed layers of a family that has one for them."""
    parameters = fields.raw.get("rope_parameters") or {}
    section = parameters.get("sliding_attention")
    if section is None:
        return RopeConfig(theta=fields.number("rope_local_base_freq", _LOCAL_THETA))
    return _rope(ConfigFields(fields.path, section), fields, max_position)


def _rope(rope: ConfigFields, outer: ConfigFields, max_position: int) -> RopeConfig:
    section: dict[str, Any] = rope.raw
    theta = rope.number("rope_theta", outer.number("rope_theta", _LOCAL_THETA))
    kind = section.get("rope_type") or section.get("type") or "default"
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=rope.number("factor", 1.0))
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            kind="llama3",
            factor=rope.number("factor", 8.0),
            low_freq_factor=rope.number("low_freq_factor", 1.0),
            high_freq_factor=rope.number("high_freq_factor", 4.0),
            original_max_position=rope.integer("original_max_position_embeddings", max_position),
        )
    raise ConfigError(
        f"{rope.path}: rope scaling {kind!r} is not supported, only default, linear, llama3"
    )
