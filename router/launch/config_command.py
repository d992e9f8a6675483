"""`prefixfleet config check | show | reference | reload`: the file, and what may be in it."""

from __future__ import annotations

import json

import yaml

from kvindex.foundation.arguments import CommandParser, Invocation
from kvindex.foundation.config_reference import reference as configuration_page
from router.launch.config import SECTIONS, demo_config_file, load_fleet_config
from router.launch.inspect import admin_parser, ask


def check(invocation: Invocation) -> int:
    """Validate file, environment and defaults together; a mistake raises ConfigError."""
    CommandParser(invocation, "Validate the configuration of -c FILE (default: the demo).").read()
    load_fleet_config(invocation.config_file, {}, demo=True)
    source = str(invocation.config_file or demo_config_file())
    print(json.dumps({"file": source, "ok": True}) if invocation.as_json else f"{source}: ok")
    return 0


def show(invocation: Invocation) -> int:
    """Print every setting after merging, secrets masked, as YAML or JSON."""
    CommandParser(invocation, "Print the merged configuration, secrets masked.").read()
    tree = load_fleet_config(invocation.config_file, {}, demo=True).shown()
    if invocation.as_json:
        print(json.dumps(tree, indent=2))
    else:
        print(yaml.safe_dump(tree, sort_keys=False), end="")
    return 0


def reference(invocation: Invocation) -> int:
    """Print every setting with its type, bounds, default and meaning, as docs/configuration.md."""
    CommandParser(invocation, "Print every setting that there is, as Markdown.").read()
    print(configuration_page(SECTIONS), end="")
    return 0


def reload(invocation: Invocation) -> int:
    """Make the gateway read its file again; 1 with the place of the mistake if it refuses."""
    parser = admin_parser(invocation, "Make the gateway read its configuration file again.")
    body = ask(invocation, parser, parser.read(), "/admin/config/reload", method="POST").body
    if invocation.as_json:
        print(json.dumps(body))
        return 0
    print(f"configuration {body['result']}, version {body['version']}")
    for setting in body["needs_restart"]:
        print(f"not before a restart (`prefixfleet reload`): {setting}")
    return 0
