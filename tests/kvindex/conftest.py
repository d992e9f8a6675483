"""Fixtures of the index tests: an engine's event stream, an index in memory, real servers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from kvindex.memory_index import AsyncMemoryIndex
from tests.contracts.index_subject import BOOT_NS
from tests.kvindex.stream_engine import StreamEngine
from tests.redis_server import private_redis, shared_redis

__all__ = ["private_redis", "shared_redis"]


@pytest.fixture
async def engine() -> AsyncIterator[StreamEngine]:
    engine = StreamEngine(boot_ns=BOOT_NS)
    yield engine
    await engine.close()


@pytest.fixture
async def index() -> AsyncMemoryIndex:
    return AsyncMemoryIndex()
