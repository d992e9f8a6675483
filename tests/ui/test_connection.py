"""The dashboard when a key, a connection or a view goes: it says so, and lets go of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.router.cable import Cable, cable_to
from tests.router.running_gateway import ADMIN_KEY, Running, gateway_spec, running_gateway
from tests.ui.browser import Browser, browser, is_installed
from tests.ui.dashboard import TENANTS, signed_in

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_installed(), reason="needs chromium and chromedriver"),
]

IS_STALE = "return document.getElementById('view').classList.contains('stale')"
SIGN_IN_IS_SHOWN = "return !document.getElementById('sign-in').hidden"


@asynccontextmanager
async def by_cable() -> AsyncIterator[tuple[Cable, Browser]]:
    """Sign in at a gateway over a connection that can be cut."""
    async with (
        running_gateway(gateway_spec(tenants=TENANTS)) as running,
        cable_to(running.admin_url) as cable,
        signed_in(running, url=cable.url) as page,
    ):
        yield cable, page


async def make_admin(running: Running, alias: str, role: str) -> str:
    """Make an admin key and return it."""
    body = {"alias": alias, "role": role}
    status, made = await running.admin("/admin/admins", method="POST", body=body)
    assert status == 201
    return str(made["key"])


async def test_a_key_that_is_taken_away_is_asked_for_again() -> None:
    async with running_gateway(gateway_spec(tenants=TENANTS)) as running:
        key = await make_admin(running, "eye", "viewer")
        async with signed_in(running, key=key) as page:
            status, _ = await running.admin("/admin/admins/eye", method="DELETE")
            assert status == 200
            await page.shows("this needs an admin key of the fleet")
            assert await page.script(SIGN_IN_IS_SHOWN)
            assert await page.script("return document.getElementById('view').innerText") == ""
            assert await page.script("return sessionStorage.length") == 0


async def test_a_lost_connection_is_told_and_comes_back() -> None:
    async with by_cable() as (cable, page):
        cable.cut()
        await page.shows("; trying again …")
        assert await page.script(IS_STALE)
        await cable.mend()
        await page.until(lambda: not page.driver.execute_script(IS_STALE))
        assert "trying again" not in await page.script("return document.body.innerText")


async def test_a_page_without_a_connection_keeps_its_key_and_can_be_left() -> None:
    async with by_cable() as (cable, page):
        cable.cut()
        await page.shows("; trying again …")
        assert await page.script("return sessionStorage.length") == 1
        await page.click("#leave")
        assert await page.script(SIGN_IN_IS_SHOWN)
        await cable.mend()
        await page.type("#key", ADMIN_KEY + "\n")
        await page.find("[data-replica=r0]")
        assert await page.script("return document.getElementById('sign-in-error').innerText") == ""


async def test_what_can_be_no_key_is_said_before_it_is_sent() -> None:
    async with running_gateway(gateway_spec(tenants=TENANTS)) as running, browser() as page:
        await page.open(f"{running.admin_url}/ui")
        await page.type("#key", "schlüssel\n")
        await page.shows("A key has neither blanks nor letters beyond ASCII.")
        assert await page.complaints() == []


async def test_a_chart_is_let_go_with_its_view() -> None:
    async with (
        running_gateway(gateway_spec(tenants=TENANTS)) as running,
        signed_in(running) as page,
    ):
        await page.find(".chart .main-svg")
        await page.script("window.kept = document.querySelector('.chart')")
        assert await page.script("return 'layout' in window.kept")
        await page.click("[data-view=keys]")
        await page.shows("from the configuration")
        assert not await page.script("return 'layout' in window.kept")


async def test_a_key_that_is_refused_is_not_shown_as_active() -> None:
    async with running_gateway() as running:
        await running.admin("/admin/tenants", method="POST", body={"name": "initech"})
        for alias in ("blocked", "open"):
            path = "/admin/tenants/initech/keys"
            status, _ = await running.admin(path, method="POST", body={"alias": alias})
            assert status == 201
        await running.admin("/admin/tenants/initech/keys/blocked/block", method="POST")
        async with signed_in(running) as page:
            await page.click("[data-view=keys]")
            rows = "return [...document.querySelectorAll('tbody tr')].map((row) => row.innerText)"
            await page.shows("initech")
            shown = [row.split("\t") for row in await page.script(rows)]
            states = {row[1]: row[4] for row in shown if row[0] == "initech"}
            assert states == {"blocked": "blocked", "open": "active"}
