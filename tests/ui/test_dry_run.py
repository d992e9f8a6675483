"""A policy is tried on recorded traffic in the dashboard: right numbers, drawn; errors in place."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.config import RecordConfig
from tests.router.recorded_traffic import DRY_RUN, converse, recorded
from tests.router.running_gateway import gateway_spec, running_gateway
from tests.ui.browser import Browser, is_installed
from tests.ui.dashboard import EVIL, TENANTS, keep, signed_in

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_installed(), reason="needs chromium and chromedriver"),
]

DRAWN = """return [...document.querySelectorAll('.charts .chart')].map((place) =>
  place.data.map((trace) => [trace.name, trace.x, trace.y]))"""


async def choose(page: Browser, select: str, value: str) -> None:
    """Choose an option as a person does by typing."""
    element = await page.find(f"select[name={select}]")
    await page.find(f"select[name={select}] option")
    await page.run(lambda: element.send_keys(value))


async def test_a_dry_run_draws_what_the_gateway_computed(tmp_path: Path) -> None:
    record = RecordConfig(path=str(tmp_path / "trace.jsonl"))
    spec = gateway_spec(tenants=TENANTS, default_policy="round_robin", record=record)
    async with running_gateway(spec, replicas=3) as running, signed_in(running) as page:
        await converse(running)
        await recorded(running)
        await page.click("[data-view=policies]")
        await page.shows("Placed by the default now: round_robin.")
        await choose(page, "policy", "prefix_cost")
        await page.type("input[data-param=work_weight]", "2")
        await page.click("form button.primary")
        await page.shows("What it would change")
        await page.find(".charts .chart:last-child .main-svg")
        body = {"policy": "prefix_cost", "params": {"work_weight": 2.0}}
        status, answer = await running.admin(DRY_RUN, method="POST", body=body)
        assert status == 200
        now, then = answer["now"], answer["then"]
        names = ("now: round_robin", "then: prefix_cost work_weight=2")
        fields = (
            (["this tenant", "all tenants"], ("token_hit", "fleet_token_hit")),
            (["p50", "p99"], ("ttft_p50_s", "ttft_p99_s")),
            (["share of all"], ("busiest_share",)),
        )
        assert await page.script(DRAWN) == [
            [
                [name, labels, [run[field] for field in of]]
                for name, run in zip(names, (now, then), strict=True)
            ]
            for labels, of in fields
        ]
        for line in answer["sentences"]:
            await page.shows(line)
        assert now["token_hit"] < then["token_hit"]
        widths = "return [...document.querySelectorAll('.charts .chart')].map((one) => %s)"
        assert await page.script(widths % "one.scrollWidth <= one.clientWidth") == [True] * 3
        await page.script("document.querySelector('.result').scrollIntoView()")
        await keep(page, "policies")
        assert await page.complaints() == []


async def test_what_is_refused_is_said_in_place(tmp_path: Path) -> None:
    record = RecordConfig(path=str(tmp_path / "trace.jsonl"))
    spec = gateway_spec(tenants=TENANTS, record=record)
    async with running_gateway(spec, replicas=1) as running, signed_in(running) as page:
        await page.click("[data-view=policies]")
        await page.shows("Placed by the default now")
        await page.click("form button.primary")
        await page.shows("nothing has been recorded yet; let some traffic pass first")
        await converse(running)
        await recorded(running)
        await choose(page, "policy", "session")
        await page.type("input[data-param=max_load_factor]", "0")
        await page.click("form button.primary")
        await page.shows("it takes: max_load_factor, min_load")
        assert await page.script("return document.querySelectorAll('.chart').length") == 0


async def test_a_dry_run_can_be_cancelled(tmp_path: Path) -> None:
    record = RecordConfig(path=str(tmp_path / "trace.jsonl"))
    spec = gateway_spec(tenants=TENANTS, record=record)
    async with running_gateway(spec, replicas=1) as running, signed_in(running) as page:
        await converse(running)
        await recorded(running)
        await page.click("[data-view=policies]")
        await page.shows("Placed by the default now")
        await page.click("form button.primary")
        await page.find("progress")
        await page.click(".result button")
        await page.shows("Cancelled; nothing has changed.")
        await page.click("form button.primary")
        await page.shows("What it would change")


async def test_names_in_charts_stay_text(tmp_path: Path) -> None:
    async with (
        running_gateway(gateway_spec(tenants=TENANTS)) as running,
        signed_in(running) as page,
    ):
        await page.run(lambda: page.driver.execute_async_script(DRAW_EVIL, EVIL))
        await page.find("#evil .main-svg")
        shown = await page.script("return document.getElementById('evil').textContent")
        assert EVIL in shown
        assert await page.script("return window.hacked") is None
        assert await page.script("return document.querySelectorAll('img, #evil a').length") == 0


DRAW_EVIL = """
const [evil, done] = arguments;
import("/ui/charts.js").then(({bars, draw}) => {
  const place = document.createElement("div");
  place.id = "evil";
  document.body.append(place);
  draw(place, bars([evil], [[evil, [1]], [`<b>${evil}</b><a href="x">y</a>`, [2]]]));
  done();
});
"""
