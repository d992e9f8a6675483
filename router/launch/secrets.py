"""The secrets of a fleet: made once, at the first start in a run directory, and then reused.

Tenants' keys are not among them: what is stored of a key is its SHA-256, and the clear text is in
`fleet.json` alone.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping

import msgspec

from kvindex.foundation.errors import ConfigError
from router.config import GENERATED_KEY, TenantConfig, TenantKey
from router.launch.run_dir import RunDirectory, write_private
from router.tenancy.tenants import hash_key


class FleetSecrets(msgspec.Struct, frozen=True, kw_only=True):
    """`fleet_secret` signs records and salts caches; `internal_token` opens replicas' routes."""

    fleet_secret: str
    internal_token: str
    admin_key: str


def load_secrets(run_dir: RunDirectory) -> FleetSecrets:
    """Return the run directory's secrets; ConfigError when there are none or they are damaged."""
    file = run_dir.secrets_file
    try:
        return msgspec.json.decode(file.read_bytes(), type=FleetSecrets)
    except FileNotFoundError:
        raise ConfigError(
            f"{file}: no such file; name the fleet's run directory with --run-dir, or give its "
            f"secrets in {', '.join(VARIABLES.values())}"
        ) from None
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"{file}: {error}; remove it to have new secrets made (cached prefixes and registered "
            "replicas of the old ones are then void)"
        ) from None


VARIABLES: Mapping[str, str] = {
    "fleet_secret": "PREFIXFLEET_FLEET_SECRET",
    "internal_token": "PREFIXFLEET_INTERNAL_TOKEN",
    "admin_key": "PREFIXFLEET_ADMIN_KEY",
}
"""Where processes of one fleet on several machines find its secrets: all of them, or none."""

_MIN_CHARS = 16


def shared_secrets(environ: Mapping[str, str] | None = None) -> FleetSecrets | None:
    """Return the secrets of the environment, None when the fleet's own two are not there.

    ConfigError naming the variable that is missing or too short to be a secret.
    """
    given = os.environ if environ is None else environ
    own = ("fleet_secret", "internal_token")
    if not any(given.get(VARIABLES[name]) for name in own):
        return None
    for variable in VARIABLES.values():
        value = given.get(variable, "")
        if len(value) < _MIN_CHARS:
            what = "is missing" if not value else f"has fewer than {_MIN_CHARS} characters"
            every = ", ".join(VARIABLES.values())
            raise ConfigError(f"{variable} {what}; a fleet on several machines needs {every}")
    return FleetSecrets(**{name: given[variable] for name, variable in VARIABLES.items()})


def load_or_create_secrets(run_dir: RunDirectory) -> FleetSecrets:
    """Return the environment's secrets, else the run directory's, made now if it has none."""
    shared = shared_secrets()
    if shared is not None:
        return shared
    if run_dir.secrets_file.exists():
        return load_secrets(run_dir)
    made = FleetSecrets(
        fleet_secret=secrets.token_urlsafe(32),
        internal_token=secrets.token_urlsafe(32),
        admin_key=f"pf-admin-{secrets.token_urlsafe(24)}",
    )
    write_private(run_dir.secrets_file, msgspec.json.format(msgspec.json.encode(made)))
    return made


def provide_keys(
    tenants: list[TenantConfig], known: dict[str, str]
) -> tuple[tuple[TenantConfig, ...], dict[str, str]]:
    """Give a key to each tenant that has none, reusing `known` ones (tenant -> clear text).

    Returns the tenants as the gateway gets them and the clear keys that were given.
    """
    provided: list[TenantConfig] = []
    keys: dict[str, str] = {}
    for tenant in tenants:
        if not tenant.keys and not tenant.anonymous:
            key = known.get(tenant.name) or f"sk-{secrets.token_urlsafe(24)}"
            keys[tenant.name] = key
            generated = TenantKey(hash=hash_key(key), alias=GENERATED_KEY)
            tenant = msgspec.structs.replace(tenant, keys=(generated,))
        provided.append(tenant)
    return tuple(provided), keys
