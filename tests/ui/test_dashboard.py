"""The dashboard: every view, the numbers of a scripted load, and nothing read as HTML."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from router.config import TenantConfig, TenantKey
from tests.router.fake_replica import key_hash
from tests.router.running_gateway import (
    ACME_KEY,
    ADMIN_KEY,
    GLOBEX_KEY,
    Running,
    chat,
    gateway_spec,
    running_gateway,
)
from tests.ui.browser import Browser, browser, is_installed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_installed(), reason="needs chromium and chromedriver"),
]

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


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    async with running_gateway(gateway_spec(tenants=TENANTS)) as gateway:
        yield gateway


@pytest.fixture
async def page(running: Running) -> AsyncIterator[Browser]:
    """Return a signed-in dashboard."""
    async with browser() as tab:
        await tab.open(f"{running.admin_url}/ui")
        await tab.type("#key", ADMIN_KEY)
        await tab.click("#sign-in button")
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


async def test_every_view_opens_without_a_word_on_the_console(
    running: Running, page: Browser
) -> None:
    await load(running)
    for view, words in {
        "fleet": "requests here",
        "decisions": "load-0",
        "index": "Hottest shared prefixes",
        "tenants": "Cached prompt tokens",
        "keys": "from the configuration",
        "playground": "Tokens at most",
    }.items():
        await page.click(f"[data-view={view}]")
        await page.shows(words)
        await keep(page, view)
    assert await page.complaints() == []


async def test_the_views_show_the_numbers_of_the_load(running: Running, page: Browser) -> None:
    await load(running)
    await page.click("[data-view=tenants]")
    rows = "return [...document.querySelectorAll('tbody tr')].map((r) => r.innerText)"
    await page.until(lambda: "acme\t5\t0\t" in "\n".join(page.driver.execute_script(rows)))
    assert any(row.startswith("globex\t1\t0\t") for row in await page.script(rows))
    await page.click("[data-view=index]")
    await page.shows("r0" if running.replicas[0].bodies else "r1")
    await page.until(lambda: "acme" in "\n".join(page.driver.execute_script(rows)))
    await page.click("[data-view=decisions]")
    await page.shows("load-4")
    await page.type("input[name=id]", "load-4")
    await page.click("form.inline button")
    await page.shows("by prefix_cost (score)")
    assert await page.complaints() == []


async def test_charts_are_drawn_under_the_strict_policy(running: Running, page: Browser) -> None:
    await load(running)
    await page.until(lambda: page.driver.execute_script("return !!window.Plotly"))
    await page.find(".chart .main-svg")
    assert await page.complaints() == []


async def test_the_playground_sends_as_a_tenant_and_explains(
    running: Running, page: Browser
) -> None:
    await page.click("[data-view=playground]")
    await page.type("textarea", LONG)
    await page.click("form button.primary")
    await page.shows("w0 w1 w2")
    await page.shows("Where it went and why")
    await keep(page, "playground")
    assert await page.complaints() == []
    sent = [body for replica in running.replicas for body in replica.bodies]
    assert [body["prefixfleet"]["tenant"] for body in sent] == ["acme"]


async def test_what_clients_write_stays_text(running: Running, page: Browser) -> None:
    status, _, _ = await running.post("/v1/chat/completions", chat(EVIL, model=EVIL))
    assert status == 200
    for view, shown in (("keys", EVIL), ("decisions", "acme"), ("tenants", "acme")):
        await page.click(f"[data-view={view}]")
        await page.shows(shown)
    await page.click("[data-view=playground]")
    await page.type("textarea", EVIL)
    await page.click("form button.primary")
    await page.shows("Where it went and why")
    assert await page.script("return window.hacked") is None
    assert await page.script("return document.querySelectorAll('img').length") == 0


async def test_a_wrong_key_is_told_and_the_page_asks_again(running: Running) -> None:
    async with browser() as tab:
        await tab.open(f"{running.admin_url}/ui")
        await tab.type("#key", "sk-wrong")
        await tab.click("#sign-in button")
        await tab.shows("this needs an admin key of the fleet")
        assert await tab.script("return sessionStorage.length") == 0


async def test_it_fits_a_phone_and_is_reached_by_keyboard(running: Running) -> None:
    async with browser(width=390, height=800) as tab:
        await tab.open(f"{running.admin_url}/ui")
        await tab.type("#key", ADMIN_KEY + "\n")
        await tab.find("[data-replica=r0]")
        for _ in range(5):
            await tab.run(lambda: tab.driver.switch_to.active_element.send_keys("\t"))
        width = await tab.script("return document.documentElement.scrollWidth - innerWidth")
        assert width <= 0
        await tab.script("document.querySelector('[role=tab]').focus()")
        await tab.run(lambda: tab.driver.switch_to.active_element.send_keys("\ue014"))
        await tab.find("input[name=id]")
        await keep(tab, "phone")
