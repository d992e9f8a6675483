"""`prefixfleet config import-litellm FILE`: move from a LiteLLM proxy, clients keep their keys.

What it prints is a configuration file; what could not be taken over goes to standard error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import yaml

from kvindex.foundation.arguments import CommandParser, Invocation
from kvindex.foundation.errors import ConfigError
from router.config import RouterConfig, TenantConfig
from router.launch.litellm_import import import_litellm


def import_litellm_command(invocation: Invocation) -> int:
    """Convert a configuration with its teams and keys; print it and what got lost."""
    parser = CommandParser(invocation, "Turn a LiteLLM setup into a configuration of ours.")
    parser.add_argument("file", type=Path, help="LiteLLM's config.yaml")
    parser.add_argument(
        "--teams",
        type=Path,
        metavar="FILE",
        help="answer of its /team/list (default: `teams` of the file)",
    )
    parser.add_argument(
        "--keys",
        type=Path,
        metavar="FILE",
        help="answer of its /key/list?return_full_object=true (default: `keys` of the file)",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="where to write (default: standard output)"
    )
    flags = parser.read()
    config = _read(flags.file)
    if not isinstance(config, dict):
        raise ConfigError(f"{flags.file}: must be a mapping, as LiteLLM's config.yaml is")
    teams = _entries(flags.teams, "teams", config)
    keys = _entries(flags.keys, "keys", config)
    done = import_litellm(config, teams=teams, keys=keys)
    _check(done.config)
    if invocation.as_json:
        print(json.dumps({"config": done.config, "not_taken_over": done.report}))
        return 0
    _write(yaml.safe_dump(done.config, sort_keys=False), flags.output)
    for line in done.report:
        print(f"not taken over: {line}", file=sys.stderr)
    return 0


def _read(file: Path) -> Any:
    """Read YAML, of which JSON is a part."""
    try:
        return yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: neither YAML nor JSON: {error}") from None


def _entries(file: Path | None, name: str, config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a list of objects: from a file of its own, bare or under its name, or the config."""
    source, value = (file, _read(file)) if file is not None else ("the file", config.get(name))
    if isinstance(value, dict):
        value = value.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        remedy = "; ask for full objects" if name == "keys" else ""
        raise ConfigError(f"{source}: {name} must be a list of objects{remedy}")
    return value


def _check(config: dict[str, Any]) -> None:
    """Make sure that what is printed is what we accept, secrets apart."""
    replicas = [
        {name: value for name, value in replica.items() if name != "api_key"}
        for replica in config["router"]["replicas"]
    ]
    try:
        msgspec.convert({"replicas": replicas}, RouterConfig)
        msgspec.convert(config["tenants"], list[TenantConfig])
    except msgspec.ValidationError as error:
        raise ConfigError(f"the import does not fit: {error}") from None


def _write(text: str, file: Path | None) -> None:
    if file is None:
        print(text, end="")
        return
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
