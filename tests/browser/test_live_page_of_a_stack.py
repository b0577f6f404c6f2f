"""The live page of real processes under load, when an executor is killed."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("playwright", reason="playwright is not installed")
pytest.importorskip("axe_playwright_python", reason="axe is not installed")

from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Page, ViewportSize, expect

from tests.support.processes.live_page import browser
from tests.support.processes.patience import PATIENCE_S
from tests.support.processes.processes import LoadedStack, loaded_stack

WIDTHS: tuple[ViewportSize, ...] = ({"width": 1360, "height": 900}, {"width": 375, "height": 812})


async def number_of_steps(page: Page, address: str) -> int:
    facts = await page.locator(f"[aria-label='Executor {address}'] .facts").inner_text()
    found = re.search(r"([\d,]+) steps", facts)
    assert found is not None, facts
    return int(found[1].replace(",", ""))


async def see_work(page: Page) -> None:
    """Waits until each thing that such a load causes has been seen."""
    swapped = page.locator("#totals div").filter(has_text="Swapped").locator("dd")
    await expect(swapped).to_have_text(re.compile("[1-9]"))
    # Blocks are given back for as long as a step is in flight, which is seldom seen.
    for state in ("held", "shared", "cached", "on the move"):
        counts = page.locator(".card .counts").filter(has_text=re.compile(rf"[1-9]\d* {state}"))
        await expect(counts.first).to_be_visible()
    for what in (r"\d+ prompt", r"\d+ decode|\d+ run", "blocks? out", "blocks? in"):
        steps = page.locator(".card .counts").filter(has_text=re.compile(rf"^step .*({what})"))
        await expect(steps.first).to_be_visible()
    await expect(page.locator("#queue button").first).to_be_visible()
    await expect(page.locator("#why")).to_contain_text("Next is ")


async def see_a_row(page: Page) -> None:
    """A row of a step is told, chosen, and its request's life shown."""
    steps = page.locator("canvas.steps").first
    await steps.focus()
    await steps.press("End")
    await expect(page.locator("#spoken")).to_contain_text(
        re.compile(r"^step \d+: .*; row 1: .+, (prompt|decode|run), \d+ tokens?")
    )
    await steps.press("Enter")
    await expect(page.locator("#life-body .events")).to_contain_text("received")


async def see_a_loss(page: Page, stack: LoadedStack) -> None:
    """One executor dies, and the other goes on."""
    killed, left = stack.processes.executors
    stack.processes.kill_executor(killed)
    lost = page.locator(f"[aria-label='Executor {killed}']")
    await expect(lost.locator(".pill")).to_contain_text("lost")
    await expect(page.locator(".card.lost")).to_have_count(1)
    totals = page.locator("#totals dd")
    await expect(totals.first).to_have_text("1")
    before = await number_of_steps(page, left)
    await expect(page.locator(f"[aria-label='Executor {left}'] .facts")).not_to_contain_text(
        f"{before:,} steps"
    )
    assert await number_of_steps(page, left) > before
    await expect(page.locator("#connection")).to_have_text("live")


async def see_nothing_hard_to_use(page: Page) -> None:
    for size in WIDTHS:
        await page.set_viewport_size(size)
        found = await Axe().run(page)
        assert found.violations_count == 0, found.generate_report()
        width = await page.evaluate("document.documentElement.scrollWidth")
        assert width == size["width"]


async def test_page_shows_a_loaded_stack_when_an_executor_dies() -> None:
    async with browser() as chromium, loaded_stack() as stack:
        problems: list[str] = []
        page = await chromium.new_page(viewport=WIDTHS[0])
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.set_default_timeout(1000 * PATIENCE_S)
        expect.set_options(timeout=1000 * PATIENCE_S)
        await page.goto(stack.url)
        await see_work(page)
        await see_a_row(page)
        await see_nothing_hard_to_use(page)
        await see_a_loss(page, stack)
        await see_nothing_hard_to_use(page)
        assert problems == []
        # Who was on the executor that died goes on elsewhere.
        assert re.search(r"\b0 failed", await stack.end_load())
