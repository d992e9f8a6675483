"""The command line: which subcommand runs which function, and what its end means as an exit code.

Targets are strings and are imported only when chosen, so `prefixfleet --help` loads neither torch
nor aiohttp. It knows no command's own flags: each function parses what follows its name.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from kvindex.foundation.arguments import Invocation
from kvindex.foundation.config_errors import nearest
from kvindex.foundation.errors import ConfigError, DependencyError, PrefixFleetError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_DEPENDENCY = 3
EXIT_INTERRUPTED = 130
_HELP = ("-h", "--help")


class Command(NamedTuple):
    """Where a subcommand lives ("module:function") and what it is for."""

    target: str
    summary: str

    def load(self) -> Callable[[Invocation], int]:
        """Import the function."""
        module, _, function = self.target.partition(":")
        loaded: Callable[[Invocation], int] = getattr(importlib.import_module(module), function)
        return loaded


COMMANDS = {
    "up": Command("router.launch.up:up", "start a fleet here and keep it running"),
    "down": Command("router.launch.down:down", "stop the fleet of a run directory"),
    "reload": Command(
        "router.launch.reload_command:reload", "have a running fleet take its changed settings"
    ),
    "status": Command("router.launch.inspect:status", "show the processes of a running fleet"),
    "top": Command("router.launch.top:top", "watch replicas, tenants and decisions"),
    "logs": Command("router.launch.inspect:logs", "print where the logs are, or the last lines"),
    "gateway": Command("router.launch.gateway_command:gateway", "run a gateway alone"),
    "engine": Command("router.launch.engine_command:engine", "run one replica alone"),
    "index status": Command("router.launch.index_command:status", "show what the index holds"),
    "index watch": Command("router.launch.index_command:watch", "show it again every second"),
    "index verify": Command(
        "router.launch.index_verify:verify", "compare the index with every replica's real pool"
    ),
    "index rebuild": Command(
        "router.launch.index_rebuild:rebuild", "make replicas load their snapshot anew"
    ),
    "index bridge": Command(
        "router.launch.index_bridge:bridge", "follow a stock vLLM's KV events into the index"
    ),
    "index explain": Command(
        "router.launch.index_explain:explain", "show how much of a prompt each replica holds"
    ),
    "replica list": Command("router.launch.inspect:replica_list", "list the gateway's replicas"),
    "replica reset-cache": Command(
        "router.launch.inspect:replica_reset_cache", "make a replica forget its cached blocks"
    ),
    "explain": Command("router.launch.explain:explain", "show why a request went where it went"),
    "replay run": Command("sim.replay_command:run", "replay a trace on one fleet, one policy"),
    "replay search": Command("sim.replay_command:search", "replay it with many policies"),
    "replay size": Command("sim.replay_command:size", "find the smallest fleet for a latency"),
    "replay explain": Command("sim.replay_command:explain", "show why a request went there"),
    "replay validate": Command(
        "sim.live.validate_command:run", "compare a replay with the live fleet"
    ),
    "replay calibrate": Command(
        "sim.live.calibrate_command:run", "measure a replica for `--latency`"
    ),
    "trace record": Command("sim.traces.record:record", "record the traffic of any server"),
    "trace stats": Command(
        "sim.traces.command:stats", "describe a trace and the bounds that it sets"
    ),
    "trace convert": Command("sim.traces.command:convert", "write a trace in the canonical form"),
    "trace synth": Command("sim.traces.command:synth", "draw a new trace from a recorded one"),
    "trace overlay-tenants": Command(
        "sim.traces.command:overlay_tenants", "give a trace tenants, skewed as in reality"
    ),
    "config check": Command("router.launch.config_command:check", "validate the configuration"),
    "config show": Command("router.launch.config_command:show", "print the merged configuration"),
    "config reference": Command(
        "router.launch.config_command:reference", "print every setting that there is"
    ),
    "config reload": Command(
        "router.launch.config_command:reload", "make the gateway read its file again"
    ),
    "config import-litellm": Command(
        "router.launch.litellm_command:import_litellm_command",
        "turn a LiteLLM setup into a configuration",
    ),
    "tenant list": Command("router.launch.tenant_command:list_", "list the tenants"),
    "tenant show": Command("router.launch.tenant_command:show", "show one tenant and its keys"),
    "tenant create": Command("router.launch.tenant_command:create", "make a tenant"),
    "tenant update": Command("router.launch.tenant_command:update", "change a tenant"),
    "tenant delete": Command(
        "router.launch.tenant_command:delete", "remove a tenant and all of its keys"
    ),
    "key list": Command("router.launch.key_command:list_", "list API keys, never in clear"),
    "key create": Command("router.launch.key_command:create", "make an API key and print it"),
    "key block": Command("router.launch.key_command:block", "refuse a key at once everywhere"),
    "key unblock": Command("router.launch.key_command:unblock", "take a blocked key again"),
    "key rotate": Command(
        "router.launch.key_command:rotate", "replace a key, the old one works for a while"
    ),
    "key delete": Command("router.launch.key_command:delete", "remove a key"),
    "admin list": Command("router.launch.admin_command:list_", "list the keys of the admin API"),
    "admin create": Command(
        "router.launch.admin_command:create", "make an admin key with a role and print it"
    ),
    "admin delete": Command("router.launch.admin_command:delete", "remove an admin key"),
    "usage show": Command("router.launch.usage_command:show", "show what tenants have used"),
    "usage export": Command(
        "router.launch.usage_command:export", "write every request as JSON lines or CSV"
    ),
    "policy list": Command("router.launch.policy_command:list_", "list the placement policies"),
    "policy set": Command("router.launch.policy_command:set_", "place a tenant by another policy"),
    "policy dry-run": Command(
        "router.launch.policy_command:dry_run", "try a policy on a tenant's recorded traffic"
    ),
    "doctor": Command("router.launch.doctor:doctor", "check that this machine can run a fleet"),
    "commands reference": Command(
        "router.launch.commands_command:reference", "print every command with its arguments"
    ),
}
SHARED_OPTIONS = {
    "-c FILE, --config FILE": "read settings from a YAML file",
    "--json": "print JSON where there is something to print",
    "-h, --help": "explain a command, or list them",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0 ok, 1 failed, 2 usage or configuration, 3 dependency unreachable, 4 a replica would not stay
    up, 130 interrupted.
    """
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except ConfigError as error:
        return _fail(error, EXIT_USAGE)
    except DependencyError as error:
        return _fail(error, EXIT_DEPENDENCY)
    except PrefixFleetError as error:
        return _fail(error, getattr(error, "exit_code", EXIT_FAILED))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe (`| head`) has left: not an error, but nothing more can be written.
        sys.stderr.close()
        return EXIT_FAILED
    except OSError as error:
        if error.filename is None:
            raise
        # A full disk, or a file that belongs to somebody else: no fault of the program.
        return _fail(f"{error.filename}: {error.strerror}", EXIT_FAILED)


def _fail(reason: object, code: int) -> int:
    print(f"prefixfleet: {reason}", file=sys.stderr)
    return code


def _run(argv: list[str]) -> int:
    rest, config_file, as_json = _take_shared_options(argv)
    if rest and rest[0] in ("help", *_HELP):
        rest = [*rest[1:], "--help"]
    if not rest or rest[0] in _HELP:
        print(_help(COMMANDS))
        return 0 if rest else EXIT_USAGE
    if rest[0] == "--version":
        from importlib.metadata import version

        print(f"prefixfleet {version('prefixfleet')}")
        return 0
    if len(rest) == 2 and rest[1] in _HELP and (group := _group(rest[0])):
        print(_help(group))
        return 0
    name, arguments = _match_command(rest)
    invocation = Invocation(
        name, arguments, config_file=config_file, as_json=as_json, default_of=_default_of
    )
    return COMMANDS[name].load()(invocation)


def _take_shared_options(argv: list[str]) -> tuple[list[str], Path | None, bool]:
    """Take `-c FILE`, `--config FILE` and `--json` out of any position."""
    rest: list[str] = []
    config_file: Path | None = None
    as_json = False
    words = iter(argv)
    for word in words:
        if word in ("-c", "--config"):
            value = next(words, None)
            if value is None:
                raise ConfigError(f"{word} needs a file: {word} FILE")
            config_file = Path(value)
        elif word.startswith("--config="):
            config_file = Path(word.partition("=")[2])
        elif word == "--json":
            as_json = True
        else:
            rest.append(word)
    return rest, config_file, as_json


def _match_command(words: list[str]) -> tuple[str, list[str]]:
    """Find the command that the first one or two words name."""
    for length in (2, 1):
        name = " ".join(words[:length])
        if name in COMMANDS:
            return name, words[length:]
    if group := _group(words[0]):
        if len(words) == 1:
            raise ConfigError(f"{words[0]} needs one of: {', '.join(sorted(group))}")
        known = [name.partition(" ")[2] for name in group]
        raise ConfigError(f"unknown command {' '.join(words[:2])!r}{nearest(words[1], known)}")
    if words[0].startswith("-"):
        raise ConfigError(f"unknown option {words[0]}; options of a command follow its name")
    raise ConfigError(f"unknown command {words[0]!r}{nearest(words[0], COMMANDS)}")


def _group(word: str) -> dict[str, Command]:
    """Return the commands of two words that begin with one."""
    return {name: command for name, command in COMMANDS.items() if name.startswith(f"{word} ")}


def _default_of(setting: str) -> str:
    from router.launch.config import default_of

    return default_of(setting)


def _help(commands: Mapping[str, Command]) -> str:
    width = max(map(len, commands)) + 2
    lines = [f"  {name:<{width}}{command.summary}" for name, command in commands.items()]
    options = [f"  {option:<25}{text}" for option, text in SHARED_OPTIONS.items()]
    return "\n".join(
        [
            "usage: prefixfleet COMMAND [options]",
            "       prefixfleet --version",
            "",
            "One OpenAI-compatible URL in front of a fleet of LLM replicas.",
            "",
            "commands:",
            *lines,
            "",
            "options, in any position:",
            *options,
            "",
            "`prefixfleet COMMAND --help` lists a command's own options.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
