"""The dashboard: every view, the numbers of a scripted load, and nothing read as HTML."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.router.running_gateway import Running, chat, gateway_spec, running_gateway
from tests.ui.browser import Browser, browser, is_installed
from tests.ui.dashboard import EVIL, LONG, TENANTS, keep, load, signed_in

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_installed(), reason="needs chromium and chromedriver"),
]


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    async with running_gateway(gateway_spec(tenants=TENANTS)) as gateway:
        yield gateway


@pytest.fixture
async def page(running: Running) -> AsyncIterator[Browser]:
    async with signed_in(running) as tab:
        yield tab


async def test_every_view_opens_without_a_word_on_the_console(
    running: Running, page: Browser
) -> None:
    await load(running)
    for view, words in {
        "fleet": "20 gpu",
        "decisions": "load-0",
        "index": "Hottest shared prefixes",
        "tenants": "Cached prompt tokens",
        "policies": "Placed by the default now: prefix_cost.",
        "keys": "from the configuration",
        "playground": "Tokens at most",
    }.items():
        await page.click(f"[data-view={view}]")
        await page.shows(words)
        await keep(page, view)
    assert await page.complaints() == []


async def test_the_views_show_the_numbers_of_the_load(running: Running, page: Browser) -> None:
    await load(running)
    # The first computes 323 tokens, the next four of the tenant find 320 of them cached.
    await page.shows("hit rate (prompt tokens)")
    shown = "return [...document.querySelectorAll('.card')].map((card) => card.innerText)"
    await page.until(lambda: "79.3 %" in "\n".join(page.driver.execute_script(shown)))
    await page.click("[data-view=tenants]")
    rows = "return [...document.querySelectorAll('tbody tr')].map((r) => r.innerText)"
    await page.until(lambda: "acme\t5\t0\t0\t" in "\n".join(page.driver.execute_script(rows)))
    assert any(row.startswith("globex\t1\t0\t0\t") for row in await page.script(rows))
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
    async with signed_in(running, width=390, height=800) as tab:
        await load(running)
        for _ in range(5):
            await tab.run(lambda: tab.driver.switch_to.active_element.send_keys("\t"))
        width = await tab.script("return document.documentElement.scrollWidth - innerWidth")
        assert width <= 0
        await tab.script("document.querySelector('[role=tab]').focus()")
        await tab.run(lambda: tab.driver.switch_to.active_element.send_keys(Keys.ARROW_RIGHT))
        await tab.find("input[name=id]")
        await tab.shows("load-4")
        await keep(tab, "phone")


async def test_a_row_keeps_the_focus_while_others_arrive(running: Running) -> None:
    async with signed_in(running) as tab:
        await load(running)
        await tab.click("[data-view=decisions]")
        await tab.shows("load-2")
        await tab.script(
            "[...document.querySelectorAll('tr.pick')]"
            ".find((row) => row.innerText.includes('load-2')).focus()"
        )
        await running.post("/v1/chat/completions", chat(LONG), **{"x-request-id": "the-next"})
        await tab.shows("the-next")
        await tab.run(lambda: tab.driver.switch_to.active_element.send_keys(Keys.ENTER))
        dialog = await tab.find("dialog")
        assert "load-2" in await tab.run(lambda: dialog.text)
        await tab.run(lambda: tab.driver.switch_to.active_element.send_keys(Keys.ESCAPE))
        await tab.until(lambda: not tab.driver.find_elements(By.CSS_SELECTOR, "dialog"))
        await tab.run(lambda: tab.driver.switch_to.active_element.send_keys(Keys.SPACE))
        assert "load-2" in (await tab.find("dialog")).text


async def test_a_viewer_looks_at_everything_and_sends_nothing(running: Running) -> None:
    made = {"alias": "eye", "role": "viewer"}
    status, viewer = await running.admin("/admin/admins", method="POST", body=made)
    assert status == 201
    async with signed_in(running, key=viewer["key"]) as tab:
        await tab.click("[data-view=playground]")
        await tab.shows("A viewer's key reads, and sends nothing.")
        assert await tab.script("return document.querySelector('button.primary').disabled")
        await tab.click("[data-view=policies]")
        await tab.shows("Placed by the default now")
        assert await tab.complaints() == []
