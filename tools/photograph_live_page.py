"""Pictures of the live page for the docs, of a stack under load that loses an executor.

python -m tools.photograph_live_page FOLDER

Needs chromium and playwright. The stack is that of tests/browser/test_live_page_of_a_stack.py:
requests are preempted and swapped; when the picture for phones is taken, one executor is dead.
"""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

from playwright.async_api import Page, expect

from tests.support.processes.live_page import browser
from tests.support.processes.patience import PATIENCE_S
from tests.support.processes.processes import loaded_stack

# So many steps that the picture is full of them.
_MANY_STEPS = re.compile(r"[\d,]{3,} steps")


async def _wait_busy(page: Page, num_executors: int) -> None:
    """Until there is something to see: of each executor, and somebody who is swapped out."""
    facts = page.locator(".card .facts").filter(has_text=_MANY_STEPS)
    await expect(facts).to_have_count(num_executors)
    swapped = page.locator("#totals div").filter(has_text="Swapped").locator("dd")
    await expect(swapped).to_have_text(re.compile("[1-9]"))


async def main(folder: Path) -> None:
    """Writes the pictures to `folder`."""
    expect.set_options(timeout=1000 * PATIENCE_S)
    async with browser() as chromium, loaded_stack() as stack:
        desk = await chromium.new_page(viewport={"width": 1360, "height": 900})
        await desk.goto(stack.url)
        await _wait_busy(desk, 2)
        await desk.locator("#queue button").first.click()
        await expect(desk.locator("#life-body .events")).to_contain_text("first token")
        await desk.screenshot(path=folder / "live-desktop.png")
        phone = await chromium.new_page(viewport={"width": 375, "height": 812}, color_scheme="dark")
        await phone.goto(stack.url)
        await _wait_busy(phone, 2)
        stack.processes.kill_executor(next(iter(stack.processes.executors)))
        await expect(phone.locator(".card.lost")).to_have_count(1)
        await _wait_busy(phone, 1)
        await phone.screenshot(path=folder / "live-phone.png", full_page=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
