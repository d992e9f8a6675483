"""A signed-in dashboard before a gateway that has had some traffic."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from router.config import TenantConfig, TenantKey
from tests.router.fake_replica import key_hash
from tests.router.running_gateway import ACME_KEY, ADMIN_KEY, GLOBEX_KEY, Running, chat
from tests.ui.browser import Browser, browser

EVIL = "<img src=x onerror=window.hacked=1>"
LONG = "the long story of a lonely lighthouse keeper " * 8
IMAGES = Path(os.environ.get("PREFIXFLEET_SCREENSHOTS", ""))
TENANTS = (
    TenantConfig(
        name="acme",
        keys=(TenantKey(hash=key_hash(ACME_KEY), alias="ci", owner=EVIL),),
        aliases={EVIL: "tiny"},
    ),
    TenantConfig(name="globex", keys=(TenantKey(hash=key_hash(GLOBEX_KEY)),)),
)


@asynccontextmanager
async def signed_in(
    running: Running,
    *,
    key: str = ADMIN_KEY,
    url: str | None = None,
    width: int = 1280,
    height: int = 900,
) -> AsyncIterator[Browser]:
    """Open the dashboard, at the admin listener unless `url` leads there, and sign in."""
    async with browser(width=width, height=height) as tab:
        await tab.open(f"{url or running.admin_url}/ui")
        await tab.type("#key", key + "\n")
        await tab.find("[data-replica=r0]")
        yield tab


async def load(running: Running) -> None:
    """Send five requests of one tenant with a common prefix, one of another."""
    for i in range(5):
        status, _, _ = await running.post(
            "/v1/chat/completions", chat(LONG), **{"x-request-id": f"load-{i}"}
        )
        assert status == 200
    status, _, _ = await running.post("/v1/chat/completions", chat(LONG), key=GLOBEX_KEY)
    assert status == 200


async def keep(page: Browser, name: str) -> None:
    """Keep a screenshot where the documentation shows it, when asked to."""
    if IMAGES.name:
        await page.screenshot(IMAGES / f"{name}.png")
