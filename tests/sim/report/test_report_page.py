"""The replay's page in a browser, from its file: every chart is drawn, and names stay text."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.replay import read_bounds, report_replay
from sim.report.page import write_page
from sim.report.traffic import describe_traffic
from sim.traces.row import TraceRow
from tests.sim.replaying import BLOCK_SIZE, HEADER, arrivals, plain, row
from tests.ui.browser import browser, is_installed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_installed(), reason="needs chromium and chromedriver"),
]

EVIL = "<img src=x onerror=window.hacked=1>"
DRAWN = """return Object.fromEntries([...document.querySelectorAll('h2')].map((head) => {
  const seen = [];
  let next = head.nextElementSibling;
  for (; next && next.tagName !== 'H2'; next = next.nextElementSibling) {
    seen.push(...next.querySelectorAll('.bar, polyline'));
  }
  return [head.textContent, seen.filter((one) => one.getBoundingClientRect().width > 0).length];
}))"""


def rows() -> list[TraceRow]:
    """Return the traffic of two tenants that each repeat a prefix of their own."""
    return [
        row(line, 0.1 * line, [line % 2, 10 + line % 5, 100 + line], tenant=(EVIL, "b")[line % 2])
        for line in range(1, 101)
    ]


def write(path: Path, *, capacities: tuple[int, ...]) -> None:
    """Write the page of a replay per policy and capacity."""
    reports = []
    for policy in ("prefix_cost", "greedy_prefix"):
        for blocks in capacities:
            config = plain(mode="open", policy=policy, replicas=2, blocks=blocks)
            bounds = read_bounds(HEADER, rows, config)
            reports.append(report_replay(HEADER, rows, config, bounds=bounds))
    traffic = describe_traffic(arrivals(rows()), block_size=BLOCK_SIZE)
    write_page(path, f"{EVIL.replace('/', '')}.jsonl", reports, traffic)


@pytest.mark.parametrize("width", [1280, 390])
async def test_the_page_draws_every_chart_from_its_file(tmp_path: Path, width: int) -> None:
    path = tmp_path / "report.html"
    write(path, capacities=(64,))
    async with browser(width=width) as tab:
        await tab.open(path.as_uri())
        drawn = await tab.script(DRAWN)
        assert drawn.pop("Reuse distance") > 0
        assert drawn == {
            "Results": 0,
            "Hit rate by policy and capacity": 2,
            "Time to first token": 2,  # Nobody waits, so that all of it is prefill.
            "Balance over time": 2,
            "Tenants": 0,
            "Price of isolation": 2,
            "Capacity": 2,
            "Hot prefixes": 0,
        }
        assert await tab.script("return document.documentElement.scrollWidth <= innerWidth")
        await tab.shows(EVIL)
        assert await tab.script("return document.querySelectorAll('img').length") == 0
        assert await tab.script("return window.hacked") is None
        assert await tab.complaints() == []


async def test_several_capacities_are_lines(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write(path, capacities=(32, 64, 128))
    async with browser() as tab:
        await tab.open(path.as_uri())
        drawn = await tab.script(DRAWN)
        assert drawn["Hit rate by policy and capacity"] == 2
        assert await tab.complaints() == []
