"""Fixtures of the fault tests: real servers."""

from __future__ import annotations

from tests.redis_server import private_redis, shared_redis

__all__ = ["private_redis", "shared_redis"]
