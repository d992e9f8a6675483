"""The flags of the ports that a gateway listens on."""

from __future__ import annotations

from kvindex.foundation.arguments import CommandParser


def add_ports(parser: CommandParser) -> None:
    """Add the port of the API and that of the admin API."""
    parser.override("--port", "router.port", type=int, help="port of the API, 0 for a free one")
    parser.override(
        "--admin-port",
        "router.admin_port",
        type=int,
        metavar="PORT",
        help="port of the admin API, 0 likewise",
    )
