"""A real Chromium without a window, where there is one."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
DEADLINE = 60.0


@contextmanager
def browser() -> Iterator[Browser]:
    """One that does not outlive the block."""
    assert CHROMIUM is not None
    assert DRIVER is not None
    options = ChromeOptions()
    options.binary_location = CHROMIUM
    # Root, as which tests run in containers, may not have Chromium's own sandbox.
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1200,1600"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=Service(DRIVER))
    driver.set_script_timeout(DEADLINE)
    try:
        yield Browser(driver)
    finally:
        driver.quit()


class Browser:
    """What a test does with it."""

    def __init__(self, driver: Chrome) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        """Goes to a page and waits until a model is named on it."""
        self.driver.get(url)
        self.wait_for(lambda: "version" in self.text("served"), "the model is named")

    def text(self, element_id: str) -> str:
        """What an element says."""
        return str(self.run(f"return document.getElementById({element_id!r}).textContent"))

    def click(self, element_id: str) -> None:
        """As a user does."""
        self.driver.find_element(By.ID, element_id).click()

    def type(self, element_id: str, *keys: str) -> None:
        """Keys, while the element has the focus."""
        self.driver.find_element(By.ID, element_id).send_keys(*keys)

    def fill(self, element_id: str, value: object) -> None:
        """Another value for a field."""
        field = self.driver.find_element(By.ID, element_id)
        field.clear()
        field.send_keys(str(value))

    def run(self, script: str) -> Any:
        """What a script returns."""
        return self.driver.execute_script(script)

    def prefer(self, scheme: str) -> None:
        """light or dark, as the system says."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def resize(self, width: int, height: int) -> None:
        """The screen of another device."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def complaints(self) -> list[str]:
        """Errors and warnings in the console since it was last asked."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] != "INFO"]

    def wait_for(self, holds: Callable[[], bool], what: str) -> None:
        """Until it holds."""
        end = time.monotonic() + DEADLINE
        while not holds():
            assert time.monotonic() < end, f"never: {what}; console: {self.complaints()}"
            time.sleep(0.02)
