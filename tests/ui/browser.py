"""A headless Chromium that is driven from an asyncio test, one call after the other."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

T = TypeVar("T")

DEADLINE_S = 15.0


def is_installed() -> bool:
    """Whether this machine has a browser and its driver."""
    return shutil.which("chromium") is not None and shutil.which("chromedriver") is not None


@dataclass(slots=True)
class Browser:
    """One tab. Every method returns when the page has done what it is to do."""

    driver: webdriver.Chrome

    async def run(self, action: Callable[[], T]) -> T:
        """Do something with the driver, off the event loop."""
        return await asyncio.to_thread(action)

    async def open(self, url: str) -> None:
        await self.run(lambda: self.driver.get(url))

    async def until(self, condition: Callable[[], T]) -> T:
        """Return the first true value of a condition; fail with what it was after the deadline."""

        def wait() -> T:
            ends_at = time.monotonic() + DEADLINE_S
            while True:
                try:
                    found = condition()
                except Exception as error:
                    if time.monotonic() > ends_at:
                        raise AssertionError(f"the page never got there: {error}") from error
                    found = None
                if found:
                    return found
                assert time.monotonic() < ends_at, f"the page says: {self._text()[:2000]}"
                time.sleep(0.05)

        return await self.run(wait)

    async def shows(self, text: str) -> None:
        """Return once a text is on the page."""
        await self.until(lambda: text in self._text())

    async def find(self, css: str) -> WebElement:
        """Return the first element of a selector, once it is there and visible."""
        found = await self.until(
            lambda: [e for e in self.driver.find_elements(By.CSS_SELECTOR, css) if e.is_displayed()]
        )
        return found[0]

    async def click(self, css: str) -> None:
        element = await self.find(css)
        await self.run(element.click)

    async def type(self, css: str, text: str) -> None:
        element = await self.find(css)
        await self.run(element.clear)
        await self.run(lambda: element.send_keys(text))

    async def script(self, code: str) -> Any:
        return await self.run(lambda: self.driver.execute_script(code))

    async def screenshot(self, path: Path) -> None:
        await self.run(lambda: self.driver.save_screenshot(str(path)))

    async def complaints(self) -> list[str]:
        """Return what the page has written to the console as errors since the last call."""
        entries = await self.run(lambda: self.driver.get_log("browser"))  # type: ignore[no-untyped-call]
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def _text(self) -> str:
        return self.driver.find_element(By.TAG_NAME, "body").text


@asynccontextmanager
async def browser(*, width: int = 1280, height: int = 900) -> AsyncIterator[Browser]:
    """Start a browser and end it."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.add_argument(f"--window-size={width},{height}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
    driver = await asyncio.to_thread(lambda: webdriver.Chrome(options=options, service=service))
    # A window is never as narrow as a phone; what it shows can be.
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    await asyncio.to_thread(driver.execute_cdp_cmd, "Emulation.setDeviceMetricsOverride", size)
    try:
        yield Browser(driver)
    finally:
        await asyncio.to_thread(driver.quit)
