"""Fixtures of the chaos tests: a real Redis."""

from __future__ import annotations

from tests.redis_server import private_redis

__all__ = ["private_redis"]
