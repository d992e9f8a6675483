"""From what a LiteLLM proxy is configured with to a configuration of ours, and what gets lost.

Pure: plain values in, plain values out. Keys come over as the SHA-256 that both systems store, so
clients keep theirs. Whatever has no counterpart here is named in the report; nothing is dropped
without a word.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from kvindex.foundation.errors import ConfigError
from router.tenancy.tenants import hash_key

Plain = Mapping[str, Any]

NO_TEAM = "no-team"
"""The tenant of keys that belong to no team."""
_LIMITS = {
    "rpm_limit": "requests_per_minute",
    "tpm_limit": "tokens_per_minute",
    "max_parallel_requests": "max_parallel",
}
_ALL_MODELS = {"*", "all-proxy-models", "all-team-models"}
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MONEY = ("max_budget", "soft_budget", "model_max_budget", "budget_duration")
_TEAM_FIELDS = {"team_id", "team_alias", "models", "model_aliases", "blocked", "keys"}
_KEY_FIELDS = {
    "token",
    "api_key",
    "key_alias",
    "team_id",
    "user_id",
    "models",
    "expires",
    "blocked",
}
_PARAMS = {"model", "api_base", "api_key"}
_BOOKKEEPING = {
    "budget_reset_at",
    "created_at",
    "created_by",
    "key_name",
    "last_active",
    "last_refreshed_at",
    "model_id",
    "model_spend",
    "spend",
    "updated_at",
    "updated_by",
}
"""What LiteLLM notes down by itself: no settings, and not worth a line."""
_SETTINGS = ("general_settings", "litellm_settings", "router_settings")
_ENV = "os.environ/"


@dataclass(frozen=True, slots=True)
class Imported:
    """A configuration as builtins, and what could not be taken over, one line each."""

    config: dict[str, Any]
    report: list[str]


@dataclass(slots=True)
class _Models:
    """The models that engines serve, and the other names that clients know them by."""

    served: set[str] = field(default_factory=set)
    aliases: dict[str, str] = field(default_factory=dict)


def import_litellm(
    config: Plain, *, teams: Iterable[Plain] = (), keys: Iterable[Plain] = ()
) -> Imported:
    """Convert a `config.yaml`, and teams and keys as `/team/list` and `/key/list` give them.

    Raises ConfigError, naming the entry, for what is not of LiteLLM's shape.
    """
    report: list[str] = []
    replicas, models = _models(config.get("model_list") or (), report)
    tenants = _tenants(teams, keys, models, report)
    _report_settings(config, report)
    return Imported({"router": {"replicas": replicas}, "tenants": tenants}, report)


def _models(entries: Iterable[Plain], report: list[str]) -> tuple[list[dict[str, Any]], _Models]:
    """Turn deployments into static replicas, one for each URL."""
    models, replicas = _Models(), dict[str, dict[str, Any]]()
    for i, entry in enumerate(entries):
        place = f"model_list[{i}]"
        name, params = entry.get("model_name"), entry.get("litellm_params")
        if not isinstance(name, str) or not isinstance(params, Mapping):
            raise ConfigError(f"{place}: needs model_name and litellm_params")
        provider, _, served = str(params.get("model", "")).partition("/")
        served = served or provider
        url = params.get("api_base")
        if not isinstance(url, str) or "*" in name:
            reason = "a wildcard" if "*" in name else "served elsewhere (it has no api_base)"
            report.append(f"{place} ({name}): {reason}; not taken over")
            continue
        models.served.add(served)
        if name != served:
            models.aliases[name] = served
        replica = replicas.setdefault(url, {"url": url})
        if provider == "hosted_vllm":
            replica["kind"] = "vllm"
        if params.get("api_key") is not None:
            replica["api_key"] = _secret(str(params["api_key"]), place, report)
        report += [
            f"{place}.litellm_params.{name}: has no counterpart"
            for name in params
            if name not in _PARAMS
        ]
        report += [
            f"{place}.{name}: has no counterpart"
            for name in entry
            if name not in ("model_name", "litellm_params")
        ]
    return list(replicas.values()), models


def _secret(value: str, place: str, report: list[str]) -> dict[str, str]:
    """Refer to a secret by a variable; one in clear is not copied."""
    if value.startswith(_ENV):
        return {"env": value.removeprefix(_ENV)}
    variable = re.sub(r"\W", "_", place).upper().strip("_") + "_API_KEY"
    report.append(
        f"{place}.litellm_params.api_key: not copied; put it into the variable {variable}"
    )
    return {"env": variable}


def _tenants(
    teams: Iterable[Plain], keys: Iterable[Plain], models: _Models, report: list[str]
) -> list[dict[str, Any]]:
    tenants: dict[str, dict[str, Any]] = {}
    names: set[str] = set()
    orphans = list(keys)
    for i, team in enumerate(teams):
        place = f"teams[{i}]"
        id, called = team.get("team_id"), team.get("team_alias") or team.get("team_id")
        if not isinstance(id, str) or not isinstance(called, str):
            raise ConfigError(f"{place}: needs team_id")
        name = _name(called, names)
        if name != called:
            report.append(f"{place} ({called}): is called {name} here")
        tenants[id] = _tenant(name, team, models, place=place, report=report)
        orphans += [{"team_id": id, **key} for key in team.get("keys") or ()]
    for i, key in enumerate(_distinct(orphans)):
        place = f"keys[{i}] ({key.get('key_alias') or 'no alias'})"
        team_id = key.get("team_id")
        if team_id is not None and team_id not in tenants:
            report.append(f"{place}: its team {team_id} is not in the list; put under {NO_TEAM}")
        if team_id not in tenants:
            team_id = NO_TEAM
            tenants.setdefault(
                team_id, _tenant(_name(NO_TEAM, names), {}, models, place=NO_TEAM, report=report)
            )
        tenants[team_id]["keys"].append(_key(key, tenants[team_id], place=place, report=report))
    return list(tenants.values())


def _tenant(
    name: str, team: Plain, models: _Models, *, place: str, report: list[str]
) -> dict[str, Any]:
    tenant: dict[str, Any] = {"name": name, "keys": []}
    allowed = _allowed(team.get("models"))
    aliases = models.aliases if allowed is None else _chosen(models.aliases, allowed)
    own = team.get("model_aliases") or {}
    if isinstance(own, Mapping):
        aliases = aliases | {a: models.aliases.get(str(m), str(m)) for a, m in own.items()}
    if aliases:
        tenant["aliases"] = dict(aliases)
    if allowed is not None:
        tenant["models"] = [model for model in allowed if model not in aliases]
    _take_limits(tenant, team, _TEAM_FIELDS, place=place, report=report)
    if team.get("blocked"):
        tenant["blocked"] = True
    return tenant


def _key(key: Plain, tenant: dict[str, Any], *, place: str, report: list[str]) -> dict[str, Any]:
    token = key.get("token") or key.get("api_key")
    if not isinstance(token, str) or not token:
        raise ConfigError(f"{place}: needs token, the hash that LiteLLM stores")
    entry: dict[str, Any] = {
        "hash": token if _SHA256.fullmatch(token) else hash_key(token),
        "alias": _name(
            key.get("key_alias") or token[:8], {other["alias"] for other in tenant["keys"]}
        ),
    }
    if key.get("user_id"):
        entry["owner"] = str(key["user_id"])
    allowed = _allowed(key.get("models"))
    if allowed is not None:
        entry["models"] = allowed
    _take_limits(entry, key, _KEY_FIELDS, place=place, report=report)
    if key.get("expires"):
        entry["expires_at"] = _instant(str(key["expires"]), place)
    if key.get("blocked"):
        entry["blocked"] = True
    return entry


def _take_limits(
    entry: dict[str, Any], source: Plain, taken: set[str], *, place: str, report: list[str]
) -> None:
    """Copy the limits that we have; report whatever else is set and was not `taken`."""
    limits = {ours: source[theirs] for theirs, ours in _LIMITS.items() if source.get(theirs)}
    if limits:
        entry["limits"] = limits
    for name, value in source.items():
        if name in _MONEY and value:
            report.append(
                f"{place}.{name}: budgets are tokens here; set tokens_per_day or tokens_per_month"
            )
        elif value and name not in taken | _LIMITS.keys() | _BOOKKEEPING:
            report.append(f"{place}.{name}: has no counterpart")


def _report_settings(config: Plain, report: list[str]) -> None:
    for section in _SETTINGS:
        for name in config.get(section) or {}:
            if name == "master_key":
                report.append(
                    f"{section}.master_key: the admin key is in the run directory instead"
                )
            else:
                report.append(f"{section}.{name}: not taken over")
    known = {"model_list", *_SETTINGS, "teams", "keys"}
    report += [f"{name}: not taken over" for name in config if name not in known]


def _allowed(models: Any) -> list[str] | None:
    """Return an allow-list; None where all models are meant, which is what an empty list means."""
    if not models or _ALL_MODELS & set(models):
        return None
    return [str(model) for model in models]


def _chosen(aliases: Mapping[str, str], allowed: list[str]) -> dict[str, str]:
    return {name: model for name, model in aliases.items() if name in allowed}


def _distinct(keys: Iterable[Plain]) -> list[Plain]:
    """Keep the first of each key: exports of teams and of keys overlap."""
    found: dict[object, Plain] = {}
    for i, key in enumerate(keys):
        found.setdefault(key.get("token") or i, key)
    return list(found.values())


def _name(wanted: str, taken: set[str]) -> str:
    """Return a name of the allowed characters that nobody has, and take it."""
    base = re.sub(r"[^A-Za-z0-9._-]+", "-", wanted).strip("-._")[:56] or "unnamed"
    name, number = base, 2
    while name in taken:
        name, number = f"{base}-{number}", number + 1
    taken.add(name)
    return name


def _instant(text: str, place: str) -> float:
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"{place}: expires {text!r} is not an ISO 8601 instant") from None
    return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()
