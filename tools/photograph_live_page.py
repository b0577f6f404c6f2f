"""Pictures of the live page for the docs, of the bundled model under load.

python tools/photograph_live_page.py FOLDER

Needs chromium and playwright. Requests are preempted and swapped, and one executor is drained.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from playwright.async_api import async_playwright

from splitserve_client import AsyncClient, SamplingParams, SplitserveError

_SCHEDULER, _HTTP, _PAGE = "127.0.0.1:18051", "127.0.0.1:18000", "127.0.0.1:18001"
_SERVE = (
    *("-m", "splitserve_cli", "serve", "--no-demo", "--num-executors", "2"),
    *("--listen", _SCHEDULER, "--http", _HTTP, "--live-listen", _PAGE),
    *("--num-device-blocks", "512", "--num-host-blocks", "256", "--max-num-seqs", "48"),
    *("--preemption-mode", "swap", "--speculation", "prompt-lookup"),
)
_NUM_REQUESTS = 56
_VIEWS = (("live-desktop", 1360, 900, "light"), ("live-phone", 375, 812, "dark"))


async def _ask_for_ever(client: AsyncClient, number: int) -> None:
    rng = random.Random(number)
    prefix = [5 + number % 3] * 64
    while True:
        prompt = prefix + [rng.randrange(3, 400) for _ in range(rng.randrange(10, 400))]
        params = SamplingParams(seed=number, max_tokens=rng.randrange(60, 300))
        with suppress(SplitserveError):
            await client.complete(prompt, params, request_id=f"job-{number:02}-{len(prompt)}")


async def _photograph(folder: Path) -> None:
    path = shutil.which("chromium")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for name, width, height, scheme in _VIEWS:
            page = await browser.new_page(
                viewport={"width": width, "height": height},
                color_scheme="dark" if scheme == "dark" else "light",
            )
            await page.goto(f"http://{_PAGE}/")
            await page.wait_for_selector("#queue button", timeout=120_000)
            await page.wait_for_timeout(8_000)
            if width > height:
                await page.locator("#queue button").first.click()
                await page.wait_for_timeout(2_500)
            await page.screenshot(path=folder / f"{name}.png")
        await browser.close()


async def main(folder: Path) -> None:
    """Writes the pictures to `folder`."""
    serving = await asyncio.create_subprocess_exec(sys.executable, *_SERVE)
    try:
        async with AsyncClient(_SCHEDULER) as client:
            load = [asyncio.create_task(_ask_for_ever(client, n)) for n in range(_NUM_REQUESTS)]
            await _photograph(folder)
            for task in load:
                task.cancel()
            await asyncio.wait(load)
    finally:
        serving.terminate()
        await serving.wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
