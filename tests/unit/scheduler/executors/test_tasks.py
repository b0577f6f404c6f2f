from __future__ import annotations

import asyncio
import gc

from scheduler_service.executors.applicants import Tasks


async def test_task_goes_on_when_nobody_else_keeps_it_and_ends_with_its_owner() -> None:
    ended: list[str] = []

    async def wait(name: str) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append(name)

    async def break_off() -> None:
        raise RuntimeError("a bug")

    tasks = Tasks()
    for name in "abc":
        tasks.begin(wait(name))
    tasks.begin(break_off())
    await asyncio.sleep(0)
    gc.collect()
    assert ended == []
    await tasks.close()
    assert ended == ["a", "b", "c"]
