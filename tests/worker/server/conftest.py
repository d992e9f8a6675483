"""Fixtures of the replica's tests."""

from tests.redis_server import private_redis

__all__ = ["private_redis"]
