"""Turns of grammars that wait to be checked, and cached verdicts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import pytest
import pytest_asyncio

from splitserve_gateway.grammars import (
    CheckerLimits,
    CheckProcess,
    GrammarChecker,
    GrammarCheckUnavailable,
    trials,
)
from splitserve_grammars import GrammarTrialResult, TrialTooSlow
from splitserve_text import Grammar, Regex

pytestmark = pytest.mark.asyncio(loop_scope="module")


class HeldProcess(CheckProcess):
    """Says of each grammar what the test says, when it says it."""

    def __init__(self) -> None:
        super().__init__(0, 0)
        self.asked: list[str] = []
        self.gate = asyncio.Semaphore(0)
        self.is_too_slow = False
        self.is_broken = False

    async def ask(self, kind: str, texts: Sequence[str], max_cpu_s: float) -> GrammarTrialResult:
        self.asked += texts
        await self.gate.acquire()
        if self.is_too_slow:
            raise TrialTooSlow("too slow")
        if self.is_broken:
            raise RuntimeError("the handler is closed")
        return GrammarTrialResult()


@dataclass(frozen=True, slots=True)
class HeldChecker:
    """Nobody is tried before its gate lets them."""

    checker: GrammarChecker
    first: HeldProcess
    second: HeldProcess

    async def ask(self, text: str, tenant: str = "") -> asyncio.Task[Grammar]:
        """Waits until it waits."""
        task = asyncio.create_task(self.checker.check("field", Regex(text), tenant))
        await settle()
        return task


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest_asyncio.fixture(loop_scope="module")
async def held(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HeldChecker]:
    # Of grammars, then of answers, which these tests do not check.
    processes = [HeldProcess() for _ in range(4)]
    made = iter(processes)
    monkeypatch.setattr(trials, "CheckProcess", lambda *_: next(made))
    checker = GrammarChecker(CheckerLimits(max_cached=2))
    second, first, *_ = processes
    yield HeldChecker(checker, first, second)
    await checker.close()


async def test_tenants_take_turns_when_one_asks_for_much(held: HeldChecker) -> None:
    tasks = [await held.ask(f"a{index}", "a") for index in range(4)]
    tasks += [await held.ask(f"b{index}", "b") for index in range(2)]
    tasks += [await held.ask("c0", "c")]
    held.first.gate.release()
    for _ in tasks:
        held.first.gate.release()
        await settle()

    assert held.first.asked == ["a0", "a1", "b0", "c0", "a2", "b1", "a3"]


async def test_grammar_is_not_tried_when_all_who_asked_have_gone(held: HeldChecker) -> None:
    tried = await held.ask("tried")
    gone = [await held.ask("gone") for _ in range(3)]
    wanted = [await held.ask("wanted") for _ in range(2)]
    for asker in (tried, *gone, wanted[0]):
        asker.cancel()
    for _ in range(4):
        held.first.gate.release()
        await settle()

    assert await wanted[1] == Regex("wanted")
    assert held.first.asked == ["tried", "wanted"]
    assert await held.checker.check("field", Regex("tried")) == Regex("tried")  # is remembered
    assert held.first.asked == ["tried", "wanted"]


async def test_quick_grammars_do_not_wait_behind_second_tries(held: HeldChecker) -> None:
    held.first.is_too_slow = True
    slow = [await held.ask(f"slow{index}") for index in range(3)]
    gone = await held.ask("gone")
    for number in range(4):
        if number == 3:
            gone.cancel()
        held.first.gate.release()
        await settle()
    held.first.is_too_slow = False
    quick = await held.ask("quick")
    held.first.gate.release()
    assert await quick == Regex("quick")
    assert held.second.asked == ["slow0"]

    for _ in range(4):
        held.second.gate.release()
    assert await asyncio.gather(*slow) == [Regex(f"slow{index}") for index in range(3)]
    assert held.second.asked == ["slow0", "slow1", "slow2"]


async def test_others_are_tried_when_trying_one_raises_what_nobody_expects(
    held: HeldChecker, caplog: pytest.LogCaptureFixture
) -> None:
    held.first.is_broken = True
    unlucky = await held.ask("unlucky")
    held.first.gate.release()
    with pytest.raises(GrammarCheckUnavailable):
        await unlucky

    held.first.is_broken = False
    other = await held.ask("other")
    held.first.gate.release()
    assert await other == Regex("other")
    assert "grammar_checker_broken" in caplog.text


async def test_only_the_latest_verdicts_are_kept(held: HeldChecker) -> None:
    for _ in range(8):
        held.first.gate.release()
    for index in (0, 1, 2, 3, 3, 2, 0):
        await held.checker.check("field", Regex(f"a{index}"))

    assert held.first.asked == ["a0", "a1", "a2", "a3", "a0"]
