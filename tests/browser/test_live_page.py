"""The live page in a real browser: content, keyboard, accessibility, lost connections."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

import pytest
import pytest_asyncio

pytest.importorskip("playwright", reason="playwright is not installed")
pytest.importorskip("axe_playwright_python", reason="axe is not installed")

from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Page, Route, ViewportSize, expect
from starlette.requests import Request

from splitserve_client import AsyncClient, SamplingParams, SchedulingParams
from splitserve_contract import DomainError
from splitserve_live import BLOCK_STATES
from tests.contract.stranger.process import poll
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.processes.fake_service import StepWatch
from tests.support.processes.held_stack import DESKTOP, PATIENCE_MS, held_stack
from tests.support.processes.live_page import browser, live_page
from tests.support.processes.scheduler_in_process import scheduler_in_process

# Some of these wait for the executor.
MANY_REQUESTS = 28
# As request_panel.js has it.
MAX_SHOWN = 8
PHONE: ViewportSize = {"width": 375, "height": 812}
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browsing() -> AsyncIterator[Browser]:
    """One browser for all tests; each has pages of its own."""
    async with browser() as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def chromium(browsing: Browser) -> AsyncIterator[Browser]:
    """The browser, whose pages are closed after each test."""
    yield browsing
    for context in browsing.contexts:
        await context.close()


async def test_page_shows_the_state_when_requests_are_swapped(chromium: Browser) -> None:
    async with held_stack(chromium) as stack:
        state = await stack.state()
        (executor,) = state.executors.values()
        told = executor.latest
        num_waiting = state.frame.num_waiting + told.num_waiting
        totals = stack.page.locator("#totals dd")
        await expect(totals.nth(0)).to_have_text("1")
        await expect(totals.nth(1)).to_have_text(str(len(told.running)))
        await expect(totals.nth(2)).to_have_text(str(num_waiting))
        await expect(totals.nth(3)).to_have_text(str(len(told.swapped)))
        waiting = state.requests([*state.frame.waiting, *told.waiting])
        names = await stack.page.locator("#queue .id").all_inner_texts()
        assert names == [request.request_id for request in waiting]
        # The first line of counts is that of the latest step.
        for index, pool in enumerate((executor.device, executor.host), 1):
            counts = Counter(pool.states)
            text = await stack.page.locator(".card .counts").nth(index).inner_text()
            assert text.startswith(f"{len(pool.states)} blocks of 4 tokens: ")
            # It is the legend, too.
            signs = stack.page.locator(".card .counts").nth(index).locator(".sign")
            await expect(signs).to_have_count(len(BLOCK_STATES))
            # What moved before the page looked is on the move for nobody else.
            for number in (1, 2):
                if counts[number]:
                    assert f"{counts[number]} {BLOCK_STATES[number]}" in text


async def test_map_names_the_owner_of_each_block(chromium: Browser) -> None:
    async with held_stack(chromium) as stack:
        (executor,) = (await stack.state()).executors.values()
        state = await stack.state()
        await stack.page.locator("canvas.map").first.focus()
        said = [await stack.page.locator("#spoken").inner_text()]
        for _ in range(len(executor.device.states) - 1):
            said.append(await stack.speaks("canvas.map", "ArrowRight"))  # noqa: PERF401
        for block, (number, holder) in enumerate(
            zip(executor.device.states, executor.device.holders, strict=True)
        ):
            whose = f", of {state.request(holder).request_id}" if holder else ""
            assert said[block] == f"block {block}: {BLOCK_STATES[number]}{whose}"


async def test_request_is_shown_when_its_block_is_chosen(chromium: Browser) -> None:
    async with held_stack(chromium) as stack:
        state = await stack.state()
        (executor,) = state.executors.values()
        block = next(i for i, number in enumerate(executor.device.holders) if number)
        name = state.request(executor.device.holders[block]).request_id
        canvas, title = stack.page.locator("canvas.map").first, stack.page.locator("#life-body h3")
        await canvas.focus()
        for _ in range(block):
            await canvas.press("ArrowRight")
        await canvas.press("Enter")
        await expect(title).to_have_text(name)
        await expect(stack.page.locator("#life-body dd").first).to_contain_text("runs")
        # What it went through before the page was opened.
        events = stack.page.locator(".events")
        await expect(events).to_contain_text("received")
        await expect(events).to_contain_text("first token")
        await canvas.press("Escape")
        await expect(title).to_be_hidden()
        cell = await canvas.evaluate("each => each.clientWidth")
        assert cell > 0
        await canvas.click(position={"x": 16 * block + 8, "y": 8})
        await expect(title).to_have_text(name)


async def test_request_chosen_while_waiting_shows_its_end(chromium: Browser) -> None:
    async with held_stack(chromium) as stack, AsyncClient(stack.scheduler.address) as client:
        params = SamplingParams(seed=1, max_tokens=30)
        asking = asyncio.create_task(client.complete([8] * 9, params, request_id="late"))
        await stack.page.locator("#queue button").filter(has_text="late").click()
        facts, progress = stack.page.locator("#life-body dd").first, stack.page.locator("progress")
        await expect(facts).to_contain_text("waits")
        # How many tokens it has is told once it runs.
        await expect(stack.page.locator("#life-body")).to_contain_text("not seen yet")
        rows = stack.scheduler.cluster.executors[0].engine.placement.rows
        while "late" not in {sequence.request.request_id for sequence in rows.running}:
            stack.watch.hold(after=1)
            await stack.watch.wait_held()
        await expect(facts).to_contain_text("runs")
        await expect(progress).to_have_js_property("max", 9 + 30)
        asking.cancel()
        await asyncio.wait({asking})


async def test_long_history_keeps_its_beginning(chromium: Browser) -> None:
    async def prolong(route: Route) -> None:
        response = await route.fetch()
        answer = await response.json()
        for life in answer["lives"]:
            last = life["events"][-1]
            life["events"] += [{**last, "kind": f"later_{number}"} for number in range(40)]
        await route.fulfill(response=response, json=answer)

    async with held_stack(chromium) as stack:
        await stack.page.route("**/life?*", prolong)
        await stack.page.locator("#requests button").first.click()
        events = stack.page.locator(".events")
        await expect(events).to_contain_text("later 39")
        await expect(events).to_contain_text("received")
        await expect(events).to_contain_text(re.compile(r"… \d+ events more …"))
        await expect(events.locator("li")).to_have_count(4 + 1 + 16)


async def test_steps_are_described_row_by_row(chromium: Browser) -> None:
    async with held_stack(chromium) as stack:
        stack.watch.hold(after=2)
        await stack.watch.wait_held()
        await expect(stack.page.locator(".card .counts").first).to_contain_text(
            re.compile(r"step \d+:")
        )
        await stack.page.locator("canvas.steps").first.focus()
        said = await stack.speaks("canvas.steps", "End")
        assert said.startswith("step ")
        assert "row 1: request-" in await stack.speaks("canvas.steps", "ArrowDown")


async def test_page_shows_a_lost_executor_when_killed(chromium: Browser) -> None:
    async with held_stack(chromium) as stack:
        killing = asyncio.create_task(stack.executor.kill())
        await expect(stack.page.locator(".card.lost .pill")).to_contain_text("lost")
        await expect(stack.page.locator("#no-executor")).to_contain_text("No executor is serving")
        await expect(stack.page.locator("#reasons")).to_have_text("no executor is connected")
        stack.watch.release()
        await killing
        await stack.executor.start()
        await expect(stack.page.locator(".card:not(.lost)")).to_have_count(1)
        await expect(stack.page.locator("#no-executor")).to_be_hidden()


async def focused_request(page: Page) -> str:
    """Whose button in the queue has the focus; empty for none's."""
    asked = "document.activeElement.closest('#queue button')?.querySelector('.id').textContent"
    return str(await page.evaluate(f"{asked} ?? ''"))


async def test_queue_keeps_the_focus_at_the_same_request(chromium: Browser) -> None:
    async with held_stack(chromium, num_requests=MANY_REQUESTS) as stack:
        buttons, ids = stack.page.locator("#queue button"), stack.page.locator("#queue .id")
        waiting = await poll(stack.waiting)
        assert len(waiting) > 3
        await expect(ids).to_have_text(waiting[:MAX_SHOWN])
        await buttons.nth(2).focus()
        stack.abort(waiting[0])
        await expect(ids.filter(has_text=waiting[0])).to_have_count(0)
        assert await focused_request(stack.page) == waiting[2]
        # Whoever comes after one that has gone has the focus, or nobody would.
        stack.abort(waiting[2])
        await expect(ids.filter(has_text=waiting[2])).to_have_count(0)
        assert await focused_request(stack.page) == waiting[3]


async def test_paused_page_keeps_its_state_when_a_block_is_chosen(chromium: Browser) -> None:
    async with held_stack(chromium) as stack:
        facts = stack.page.locator(".card .facts")
        canvas, title = stack.page.locator("canvas.map").first, stack.page.locator("#life-body h3")
        await stack.page.get_by_role("button", name="Pause").click()
        pill = stack.page.locator("#connection")
        await expect(pill).to_contain_text("paused at")
        state, seen = await stack.state(), await facts.inner_text()
        (executor,) = state.executors.values()
        block = next(i for i, number in enumerate(executor.device.holders) if number)
        name = state.request(executor.device.holders[block]).request_id
        stack.abort(name)
        while name in await stack.holders():
            stack.watch.hold(after=1)
            await stack.watch.wait_held()
        await canvas.click(position={"x": 16 * block + 8, "y": 8})
        await expect(title).to_have_text(name)
        assert await facts.inner_text() == seen
        await stack.page.get_by_role("button", name="Resume").click()
        await expect(pill).to_have_text("live")
        await expect(facts).not_to_have_text(seen)


async def test_keys_choose_a_request_and_keep_the_focus(chromium: Browser) -> None:
    async with held_stack(chromium, num_requests=MANY_REQUESTS) as stack:
        page = stack.page
        chosen, none = (
            page.locator("#life-body h3"),
            page.get_by_role("button", name="Clear selection"),
        )
        await page.locator("#queue button").first.focus()
        await page.keyboard.press("Enter")
        await expect(chosen).to_have_text(await focused_request(page))
        await page.keyboard.press("Escape")
        await expect(chosen).to_be_hidden()
        await expect(page.locator("#spoken")).to_have_text("no request is selected")
        await page.keyboard.press("Enter")
        await none.focus()
        await page.keyboard.press("Enter")
        await expect(chosen).to_be_hidden()
        await expect(page.locator("#life-heading")).to_be_focused()


async def test_chosen_request_is_in_view_on_a_phone(chromium: Browser) -> None:
    async with held_stack(chromium, PHONE) as stack:
        steps, title = stack.page.locator("canvas.steps").last, stack.page.locator("#life-body h3")
        # Some steps move blocks and have no rows.
        while "; row 1: request-" not in await stack.speaks("canvas.steps", "End"):
            stack.watch.hold(after=1)
            await stack.watch.wait_held()
        await steps.press("Enter")
        await expect(title).to_be_in_viewport()
        await expect(steps).to_be_in_viewport()


NAMES = ("<img src=x onerror=alert(1)>", "\u202ethgir morf", "x" * 128)


async def test_names_are_shown_as_text(chromium: Browser) -> None:
    watch = StepWatch()
    async with (
        scheduler_in_process(FakeExecutor(num_device_blocks=16, fault=watch)) as scheduler,
        AsyncClient(scheduler.address) as client,
        live_page([scheduler.address]) as url,
    ):
        page = await chromium.new_page(viewport=PHONE)
        expect.set_options(timeout=PATIENCE_MS)
        dialogs: list[str] = []
        page.on("dialog", lambda dialog: dialogs.append(dialog.message))
        watch.hold()

        def ask(name: str) -> asyncio.Task[object]:
            params, scheduling = SamplingParams(max_tokens=8), SchedulingParams(tenant=name)
            return asyncio.create_task(
                client.complete([7] * 40, params, request_id=name, scheduling=scheduling)
            )

        asking = [ask("first")]
        try:
            await watch.wait_held()
            asking += [ask(name) for name in NAMES]
            await page.goto(url)
            for name in NAMES:
                button = page.locator("#queue button").filter(has_text=name)
                await button.click()
                await expect(page.locator("#life-body h3")).to_have_text(name)
                for shown in (button.locator(".id"), button.locator(".hint")):
                    box = await shown.bounding_box()
                    assert box is not None
                    assert box["width"] > 250
                await expect(button.locator(".hint")).to_contain_text("40 tokens")
            assert await page.locator("main img").count() == 0
            assert dialogs == []
            width = await page.evaluate("document.documentElement.scrollWidth")
            assert width == PHONE["width"]
        finally:
            watch.release()
            await asyncio.wait(asking)


@asynccontextmanager
async def page_after(
    chromium: Browser, num_requests: int, executor: FakeExecutor, viewport: ViewportSize
) -> AsyncIterator[Page]:
    """The page when so many prompts, each of 50 blocks of its own, were computed."""
    async with (
        scheduler_in_process(executor) as scheduler,
        AsyncClient(scheduler.address) as client,
        live_page([scheduler.address]) as url,
    ):
        expect.set_options(timeout=PATIENCE_MS)
        params = SamplingParams(max_tokens=8)
        for number in range(num_requests):
            await client.complete([number + 1] * 200, params)
        page = await chromium.new_page(viewport=viewport)
        await page.goto(url)
        await expect(page.locator("#connection")).to_have_text("live")
        yield page


async def test_map_shows_the_used_part_of_a_large_pool(chromium: Browser) -> None:
    executor = FakeExecutor(num_device_blocks=131_072, num_host_blocks=131_072)
    async with page_after(chromium, 1, executor, {"width": 1280, "height": 800}) as page:
        counts = page.locator(".card .counts")
        await expect(counts.nth(1)).to_contain_text(
            re.compile(r"^131,072 blocks of 4 tokens, the first 64 shown: .*131,0\d\d free")
        )
        await expect(counts.nth(2)).to_contain_text("131,072 blocks of 4 tokens, all free")
        await expect(page.locator("canvas.map:visible")).to_have_count(1)
        canvas = page.locator("canvas.map").first
        box = await canvas.bounding_box()
        assert box is not None
        assert box["height"] <= 40
        await canvas.focus()
        await canvas.press("End")
        await expect(page.locator("#spoken")).to_have_text("block 63: free")
        # What moves is seen without scrolling, and so is all else.
        for each in ("canvas.steps", "#history", "canvas.map", ".card", "#requests-part"):
            await expect(page.locator(each).first).to_be_in_viewport(ratio=1)


async def test_map_of_many_used_blocks_stays_small(chromium: Browser) -> None:
    executor = FakeExecutor(num_device_blocks=30_000, num_host_blocks=0)
    async with page_after(chromium, 45, executor, PHONE) as page:
        canvas, spoken = page.locator("canvas.map").first, page.locator("#spoken")
        await expect(page.locator(".card .counts").nth(1)).to_contain_text(
            re.compile(r"30,000 blocks of 4 tokens, the first 4,096 shown, (\d+) in a cell")
        )
        box = await canvas.bounding_box()
        assert box is not None
        assert box["height"] <= 160
        await canvas.focus()
        await expect(spoken).to_have_text(re.compile(r"^blocks 0 to \d+: .*\d+ cached"))
        await canvas.press("End")
        await expect(spoken).to_have_text(re.compile(r"^blocks \d+ to 4095: \d+ free$"))


async def test_page_shows_the_history_and_ttft(chromium: Browser) -> None:
    async with page_after(chromium, 1, FakeExecutor(), DESKTOP) as page:
        totals, charts = page.locator("#totals div"), page.locator("#history canvas")
        for name in ("TTFT p50", "TTFT p99"):
            latency = totals.filter(has_text=name).locator("dd")
            await expect(latency).to_have_text(re.compile(r"^[\d.]+ (µs|ms|s)$"))
        # As soon as a point is over.
        for number, said in enumerate(
            (
                r"Tokens per second, the last five minutes: now .*at most [1-9]",
                r"Time to first token, .*now p50 [\d.]+ .s?, p99 [\d.]+ ",
                r"Waiting for a row, .*now 0, at most 1$",
            )
        ):
            await expect(charts.nth(number)).to_have_attribute("aria-label", re.compile(said))


async def test_share_of_used_blocks_is_never_rounded_to_zero(chromium: Browser) -> None:
    async with (
        scheduler_in_process() as scheduler,
        live_page([scheduler.address]) as url,
    ):
        page = await chromium.new_page()
        await page.goto(url)
        code = "async ([used, blocks]) => (await import('./words.js')).share(used, blocks)"
        pairs = [(0, 131_072), (460, 131_072), (1, 3), (2047, 2048)]
        shares = [await page.evaluate(code, pair) for pair in pairs]
        assert shares == ["0 %", "<1 %", "33 %", ">99 %"]


async def test_waiting_and_running_requests_are_shown_on_a_phone(chromium: Browser) -> None:
    async with held_stack(chromium, PHONE, num_requests=MANY_REQUESTS) as stack:
        page = stack.page
        waiting = await poll(stack.waiting)
        assert len(waiting) > 4
        await expect(page.locator("#queue li")).to_have_count(4)
        await expect(page.locator("#more")).to_have_text(f"and {len(waiting) - 4} more")
        bottom = "each => each.scrollHeight - each.clientHeight"
        assert await page.locator("#queue").evaluate(bottom) == 0
        (executor,) = (await stack.state()).executors.values()
        running = sorted(set(executor.latest.running))
        state = await stack.state()
        names = [request.request_id for request in state.requests(running)]
        await expect(page.locator("#requests .id")).to_have_text(names[:4])
        # Whoever ends is told below those that run.
        for name in names:
            stack.abort(name)
        while set(names) & set(await stack.holders()):
            stack.watch.hold(after=1)
            await stack.watch.wait_held()
        await page.set_viewport_size(DESKTOP)
        facts = page.locator("#requests .hint").filter(has_text=re.compile("ended .* ago"))
        await expect(facts.first).to_be_visible()


async def test_page_says_silent_when_no_frames_come(chromium: Browser) -> None:
    may_send = asyncio.Event()
    may_send.set()

    async def sleep_until_it_may(_: float) -> None:
        await asyncio.sleep(0.05)
        await may_send.wait()

    async with (
        scheduler_in_process(FakeExecutor(), live_sleep=sleep_until_it_may) as scheduler,
        live_page([scheduler.address]) as url,
    ):
        expect.set_options(timeout=PATIENCE_MS)
        page = await chromium.new_page()
        await page.goto(url)
        pill = page.locator("#connection")
        await expect(pill).to_have_text("live")
        may_send.clear()
        await expect(pill).to_have_text("silent")
        await expect(page.locator("#problem")).to_contain_text("The picture is of ")
        may_send.set()
        await expect(pill).to_have_text("live")
        await expect(page.locator("#problem")).to_be_hidden()


async def operators_only(_: Request, credential: str) -> None:
    if credential != "the-key":
        raise DomainError("CALLER_UNKNOWN", "the credential is not valid")


async def test_page_asks_for_a_key_when_callers_are_known(chromium: Browser) -> None:
    async with scheduler_in_process(FakeExecutor()) as scheduler:
        expect.set_options(timeout=PATIENCE_MS)
        page = await chromium.new_page()
        async with live_page([scheduler.address], check=operators_only) as url:
            await page.goto(url)
            pill, key = page.locator("#connection"), page.locator("#key")
            await expect(pill).to_have_text("key needed")
            await expect(key).to_be_focused()
            await expect(page.locator("#key-problem")).to_contain_text("Only operators may watch")
            found = await Axe().run(page)
            assert found.violations_count == 0, found.generate_report()
            await key.fill("another-key")
            await key.press("Enter")
            await expect(page.locator("#key-problem")).to_have_text("the credential is not valid")
            await expect(key).to_have_value("")
            await expect(page.locator(".card")).to_have_count(0)
            await key.fill("the-key")
            await page.get_by_role("button", name="Watch").click()
            await expect(pill).to_have_text("live")
            await expect(page.locator("#key-form")).to_be_hidden()
            await expect(page.locator(".card")).to_have_count(1)
            # It stays in this tab: known after a reload, and to no other.
            await page.reload()
            await expect(pill).to_have_text("live")
            other = await chromium.new_page()
            await other.goto(url)
            await expect(other.locator("#connection")).to_have_text("key needed")


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
async def test_page_is_accessible_and_as_wide_as_its_window(
    chromium: Browser, viewport: ViewportSize
) -> None:
    async with held_stack(chromium, viewport) as stack:
        await stack.page.locator("canvas.map").first.focus()
        await stack.page.keyboard.press("Enter")
        for scheme in SCHEMES:
            await stack.page.emulate_media(color_scheme=scheme)
            found = await Axe().run(stack.page)
            assert found.violations_count == 0, found.generate_report()
            width = await stack.page.evaluate("document.documentElement.scrollWidth")
            assert width == viewport["width"]


async def test_page_shows_a_lost_connection_until_scheduler_returns(chromium: Browser) -> None:
    async with scheduler_in_process() as scheduler:
        expect.set_options(timeout=PATIENCE_MS)
        page = await chromium.new_page()
        await page.route("**/feed?*", lambda route: route.abort())
        async with live_page([scheduler.address]) as url:
            await page.goto(url)
            await expect(page.locator("#problem")).to_contain_text("keeps retrying")
            await expect(page.locator("#connection")).to_have_text("connection lost")
            # Once, and not anew each time that it tries: it is read out.
            said = "new MutationObserver((all) => (window.changes = all.length)).observe("
            said += "document.getElementById('problem'), {childList: true, subtree: true})"
            await page.evaluate(said)
            for _ in range(3):
                async with page.expect_request("**/feed?*"):
                    pass
            assert await page.evaluate("window.changes ?? 0") == 0
            await page.unroute("**/feed?*")
            await expect(page.locator("#connection")).to_have_text("live")
            await expect(page.locator("#problem")).to_be_hidden()
            await expect(page.locator("#no-executor")).to_contain_text("No executor is serving")


async def test_page_loads_nothing_external_and_respects_reduced_motion(chromium: Browser) -> None:
    async with held_stack(chromium) as stack:
        asked: list[str] = []
        stack.page.on("request", lambda request: asked.append(request.url))
        await stack.page.emulate_media(reduced_motion="reduce")
        await stack.page.reload()
        await expect(stack.page.locator("#connection")).to_have_text("live")
        assert asked
        assert {url for url in asked if not url.startswith(stack.url)} == set()
        animation = await stack.page.evaluate(
            "getComputedStyle(document.getElementById('connection'), '::before').animationName"
        )
        assert animation == "none"
