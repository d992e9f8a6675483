"""Lua scripts: read from the folder `lua` of a package, run by digest, sent again when forgotten.

It knows no keys; the header of each script lists them.
"""

from __future__ import annotations

import hashlib
from importlib import resources
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from kvindex.redis_connect import dependency_errors


class RedisScript:
    """One operation, `lua/{name}.lua`, behind the functions that it shares with others.

    Lua on a server has no modules, so the files named in `after` are put in front of it.
    """

    def __init__(self, name: str, *, after: tuple[str, ...] = (), package: str = "kvindex") -> None:
        folder = resources.files(package) / "lua"
        parts = [(folder / f"{part}.lua").read_text(encoding="utf-8") for part in (*after, name)]
        self._source = "\n".join(parts)
        self._digest = hashlib.sha1(self._source.encode(), usedforsecurity=False).hexdigest()

    async def run(self, redis: Redis, key: str, *args: bytes | str | int) -> Any:
        """Run the script with KEYS[1] = `key`; raise DependencyError when the server cannot."""
        with dependency_errors(redis):
            try:
                return await redis.evalsha(self._digest, 1, key, *args)
            except NoScriptError:
                return await redis.eval(self._source, 1, key, *args)
