"""Which settings of a gateway are read again while it runs, and which only at its start.

It compares settings and applies none.
"""

from __future__ import annotations

from router.config import RouterConfig

_HOT = ("default_policy", "default_policy_params")
_PORTS = ("port", "admin_port")


def needs_restart(running: RouterConfig, read: RouterConfig) -> tuple[str, ...]:
    """Name the settings of the router that differ and are only read at the start."""
    names = []
    for name in RouterConfig.__struct_fields__:
        old, new = getattr(running, name), getattr(read, name)
        is_free_port = name in _PORTS and new == 0
        if name not in _HOT and not is_free_port and old != new:
            names.append(f"router.{name}")
    return tuple(names)
