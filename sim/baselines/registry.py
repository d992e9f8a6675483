"""Baseline name -> baseline, with its parameters validated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from kvindex.foundation.config_errors import nearest
from kvindex.foundation.errors import ConfigError
from router.policy.registry import POLICIES
from sim.baselines.greedy_prefix import GreedyPrefix
from sim.baselines.hashing import HashOfPrefix, StickySession
from sim.baselines.production_stack import (
    LoadAware,
    LoadAwareParams,
    PrefixAware,
    PrefixAwareParams,
)
from sim.baselines.random_choice import RandomChoice
from sim.baselines.sglang import SGLangCacheAware, SGLangParams
from sim.baselines.types import Baseline


class _Entry(NamedTuple):
    params: type[msgspec.Struct]
    make: Callable[[Any], Baseline]


def _itself(baseline: Any) -> Baseline:
    """Return a baseline without state, which is its own parameters."""
    return baseline  # type: ignore[no-any-return]


BASELINES: dict[str, _Entry] = {
    "hash_of_prefix": _Entry(HashOfPrefix, _itself),
    "sticky_session": _Entry(StickySession, _itself),
    "greedy_prefix": _Entry(GreedyPrefix, _itself),
    "random": _Entry(RandomChoice, _itself),
    "sglang_cache_aware": _Entry(SGLangParams, SGLangCacheAware),
    "production_stack": _Entry(PrefixAwareParams, PrefixAware),
    "production_stack_load": _Entry(LoadAwareParams, LoadAware),
}


def policy_names() -> list[str]:
    """Return every name that a replay can be given, sorted."""
    return sorted({*POLICIES, *BASELINES})


def build_baseline(name: str, params: Mapping[str, float]) -> Baseline:
    """Make a baseline; raise ConfigError naming what is allowed."""
    entry = BASELINES.get(name)
    if entry is None:
        known = policy_names()
        raise ConfigError(f"policy {name!r}: there is none{nearest(name, known)}")
    try:
        return entry.make(msgspec.convert(_whole(params), type=entry.params))
    except msgspec.ValidationError as error:
        allowed = ", ".join(entry.params.__struct_fields__) or "none"
        raise ConfigError(f"parameters of policy {name}: {error}; it takes: {allowed}") from None


def _whole(params: Mapping[str, float]) -> dict[str, float]:
    """Return the parameters with whole numbers as integers, which counts must be."""
    return {
        name: int(value) if float(value).is_integer() else value for name, value in params.items()
    }
