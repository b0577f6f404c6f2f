"""Results of many executors leave the event loop time for everything else."""

from __future__ import annotations

import asyncio

from scheduler_service.executors.executor_link import ResultTurns

NUM_RESULTS = 5


async def _handle(turns: ResultTurns, number: int, handled: list[int]) -> None:
    await turns.take()
    handled.append(number)


async def test_turns_let_one_result_through_a_round_when_many_come_together() -> None:
    turns, handled = ResultTurns(), list[int]()
    async with asyncio.TaskGroup() as tasks:
        for number in range(NUM_RESULTS):
            tasks.create_task(_handle(turns, number, handled))
        num_handled = 0
        while num_handled < NUM_RESULTS:
            await asyncio.sleep(0)
            assert len(handled) - num_handled <= 1
            num_handled = len(handled)
    assert handled == list(range(NUM_RESULTS))


async def test_turns_pass_by_a_result_when_nobody_waits_for_it_any_more() -> None:
    turns, handled = ResultTurns(), list[int]()
    tasks = [asyncio.create_task(_handle(turns, n, handled)) for n in range(NUM_RESULTS)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.wait(tasks)
    assert handled == [0, 2, 3, 4]
    await turns.take()
