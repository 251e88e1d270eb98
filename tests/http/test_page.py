"""The page in a real browser: what it shows is what the router says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx2
import pytest
import pytest_asyncio
from selenium.webdriver.common.keys import Keys

from router.http.static import page_files
from specdecode.cost_tables import DraftCosts, StepCosts
from specdecode.types import DrafterKind
from tests.http.browser import CHROMIUM, DRIVER, Browser, browser
from tests.router.client import PROMPT
from tests.router.test_clients import Gate, is_plain
from tests.services import DEADLINE, Services

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver"),
]

RIDGE = 8
STEPS = StepCosts(
    base_seconds=0.02,
    token_seconds=0.02 / RIDGE,
    tokens=(1, 2, 4, 8, 16, 32, 64),
    seconds=(0.0225, 0.025, 0.03, 0.04, 0.06, 0.1, 0.18),
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services(model: Path) -> AsyncIterator[Services]:
    """A draft that is always right, on a machine that says where tokens in flight become dear."""
    drafts = {DrafterKind.MODEL: DraftCosts(pass_seconds=0.002)}
    async with Services.started(
        model,
        model,
        http_port=0,
        target={"costs": STEPS, "num_blocks": 1024},
        draft={"costs": drafts, "num_blocks": 1024},
    ) as started:
        yield started


async def visit(services: Services, use: Callable[[Browser], None]) -> None:
    """Uses the page in a thread; services and browser go on side by side."""

    def run() -> None:
        with browser() as opened:
            opened.open(services.router.url)
            use(opened)
            assert opened.complaints() == []

    await asyncio.to_thread(run)


def ask(page: Browser, **fields: object) -> None:
    page.fill("prompt", PROMPT)
    for name, value in {"max-tokens": 60, **fields}.items():
        page.fill(name, value)


def generate(page: Browser) -> None:
    page.type("prompt", Keys.CONTROL + Keys.ENTER)
    page.wait_for(lambda: "tokens;" in page.text("state"), "the text has come to its end")


async def test_colours_add_up_to_the_usage_and_tokens_say_their_probability(services: Services) -> None:
    def use(page: Browser) -> None:
        ask(page)
        generate(page)
        counts: dict[str, int] = page.run(
            "return Object.fromEntries([...document.querySelectorAll('#counts [data-origin]')]"
            ".map(place => [place.dataset.origin, Number(place.textContent)]))"
        )
        total = counts.pop("all")
        assert page.text("state").startswith(f"{total} tokens;")
        assert sum(counts.values()) == total
        assert counts["accepted"] > 0
        assert counts == page.run(
            "return Object.fromEntries(['accepted', 'bonus', 'recovered', 'plain']"
            ".map(name => [name, document.querySelectorAll('#text .' + name).length]))"
        )
        drafted = page.run("return document.querySelectorAll('#rounds .kept, #rounds .drafted').length")
        kept = page.run("return document.querySelectorAll('#rounds .kept').length")
        assert counts["accepted"] <= kept <= drafted
        page.type("text", Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
        assert "probability 0." in page.text("token") or "probability 1." in page.text("token")
        assert page.run("return document.querySelectorAll('#text .current').length") == 1

    await visit(services, use)
    await services.all_is_free()


async def test_the_comparison_says_identical(services: Services) -> None:
    def use(page: Browser) -> None:
        ask(page, temperature=0.9, seed=3)
        page.click("compare")
        page.wait_for(lambda: page.text("verdict") != "", "both texts are there")
        assert page.text("verdict") == "identical: yes"
        assert page.text("text-on") == page.text("text-off") != ""
        assert float(page.text("speed-off")) > 0

    await visit(services, use)


async def test_the_slider_starts_and_ends_load_and_drafts_get_fewer(services: Services) -> None:
    def use(page: Browser) -> None:
        page.run("document.getElementById('mode').value = 'auto'")
        ask(page, **{"max-tokens": 150})
        generate(page)
        page.wait_for(lambda: page.text("gamma") not in ("–", ""), "γ is told")
        alone = float(page.text("gamma"))
        page.type("load", Keys.END)
        page.wait_for(lambda: int(page.text("running").replace("–", "0")) >= 48, "48 texts run")
        page.wait_for(lambda: int(page.text("flight")) > RIDGE, "tokens in flight are beyond the ridge")
        page.wait_for(lambda: float(page.text("gamma")) < alone / 2, "γ is less under load")
        assert float(page.text("price")) >= 0
        assert page.text("ridge") == str(RIDGE)
        page.type("load", Keys.HOME)
        page.wait_for(lambda: page.text("running") == "0", "they have ended")

    await visit(services, use)
    await services.all_is_free()


async def test_machine_and_plan_are_drawn(services: Services) -> None:
    def use(page: Browser) -> None:
        for chart in ("steps-chart", "plan-chart"):
            page.wait_for(
                lambda name=chart: bool(page.run(f"return !!document.querySelector('#{name} polyline')")),  # type: ignore[misc]
                f"{chart} is drawn",
            )
        assert "drafter model" in page.text("plan-caption")

    await visit(services, use)


async def test_it_fits_a_phone_follows_the_scheme_and_names_every_field(services: Services) -> None:
    def use(page: Browser) -> None:
        ask(page)
        generate(page)
        grounds = set()
        for scheme in ("light", "dark"):
            page.prefer(scheme)
            grounds.add(page.run("return getComputedStyle(document.body).backgroundColor"))
        assert len(grounds) == 2
        page.resize(360, 740)
        assert page.run("return document.documentElement.scrollWidth <= window.innerWidth")
        unnamed = page.run(
            "return [...document.querySelectorAll('input, select, textarea')]"
            ".filter(field => !field.labels.length).map(field => field.id)"
        )
        assert unnamed == []

    await visit(services, use)


async def test_a_text_can_be_stopped_and_frees_what_it_held(services: Services) -> None:
    gate = Gate(services.target, is_plain)

    def use(page: Browser) -> None:
        ask(page)
        page.run("document.getElementById('mode').value = 'off'")  # with drafts no step may be plain
        page.click("generate")
        asyncio.run(gate.holds())
        page.click("stop")
        page.wait_for(lambda: page.text("state") == "stopped", "it has ended")
        gate.open()

    await visit(services, use)
    await services.all_is_free()


async def test_nothing_of_the_page_comes_from_elsewhere(services: Services) -> None:
    async with httpx2.AsyncClient(base_url=services.router.url, timeout=DEADLINE) as web:
        assert (await web.get("/page/nothing.js")).status_code == 404
        for name, (content, media_type) in page_files().items():
            answer = await web.get("/" if name == "index.html" else f"/page/{name}")
            assert (answer.content, answer.headers["content-type"]) == (content, media_type)
            assert "default-src 'self'" in answer.headers["content-security-policy"]
            text = content.decode().replace("http://www.w3.org/2000/svg", "")
            assert "http://" not in text
            assert "https://" not in text
