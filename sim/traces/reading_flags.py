"""The flags of how a trace is read, for every command that takes one."""

from __future__ import annotations

import argparse
from typing import get_args

from sim.traces.row import Lengths, Tail


def add_reading(group: argparse._ArgumentGroup) -> None:
    """Add what a file may leave open of partial blocks and lengths."""
    group.add_argument(
        "--tail",
        choices=get_args(Tail),
        help="whether a partial block has an id (default: as the format has it)",
    )
    group.add_argument(
        "--lengths",
        choices=get_args(Lengths),
        help="approximate: off by one id is no error (default: as the format has it)",
    )
