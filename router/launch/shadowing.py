"""Whether another distribution hides one of our flat package names, and where it lies.

It looks packages up without importing them.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from kvindex.foundation.errors import ConfigError

OUR_PACKAGES = ("kvindex", "engine", "worker", "router", "sim")


def shadowed_packages() -> dict[str, str]:
    """Return our packages that `import` would take from elsewhere: name -> what it would find."""
    ours = Path(__file__).resolve().parents[2]
    found: dict[str, str] = {}
    for name in OUR_PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            found[name] = "nothing that can be imported"
        elif Path(spec.origin).resolve() != ours / name / "__init__.py":
            found[name] = spec.origin
    return found


def require_own_packages() -> None:
    """Raise ConfigError, naming package and place, when one of ours is shadowed."""
    for name, place in shadowed_packages().items():
        raise ConfigError(
            f"`import {name}` finds {place} instead of prefixfleet's; uninstall that distribution, "
            "or use an environment of its own"
        )
