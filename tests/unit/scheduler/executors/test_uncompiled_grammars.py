"""An engine loop whose executor never compiles a grammar."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count

from scheduler_service.core.config import Feature
from scheduler_service.core.grammar import Grammar
from scheduler_service.core.scheduler import Scheduler
from splitserve.executor.v1 import executor_pb2 as pb
from tests.support.core.driver import make_config
from tests.support.core.engine_loops import (
    PATIENCE_S,
    VOCAB_SIZE,
    Clients,
    LoopLink,
    a_loop,
    a_request,
)

SCHEMA = Grammar("json_schema", ("{}",))
CONFIG = make_config(
    vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({0}), features=frozenset(Feature)
)


class NeverCompiles(LoopLink):
    """The first row of each step, which is of the request with a grammar, gets no token."""

    num_steps = 0

    def answer(self, result: pb.StepResult) -> None:
        """See LoopLink."""
        self.num_steps += 1
        num_rows = len(result.sampled_token_ids) // 4
        result.row_statuses = bytes(
            [pb.ROW_STATUS_NOT_SAMPLED, *[pb.ROW_STATUS_OK] * (num_rows - 1)]
        )
        result.sampled_token_ids = b"\xff" * 4 + result.sampled_token_ids[4:]
        super().answer(result)


async def until(clients: Clients, is_so: Callable[[], bool]) -> None:
    """Waits for what a delivery may bring."""
    while not is_so():
        clients.has_changed.clear()
        await asyncio.wait_for(clients.has_changed.wait(), PATIENCE_S)


async def test_newcomer_is_served_at_once_when_the_loop_waits_to_ask_again() -> None:
    clients, link = Clients(), NeverCompiles(CONFIG)
    # No time passes: the row would never be asked alone again.
    loop = a_loop(clients, Scheduler(CONFIG), link)
    running = asyncio.ensure_future(loop.run())
    loop.readmit(a_request(1, grammar=SCHEMA))
    await until(clients, lambda: bool(link.num_steps and loop.scheduler.ask_again_at_ns))
    loop.readmit(a_request(2, max_tokens=1))
    await until(clients, lambda: clients.finished == ["r2"])
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert link.num_steps == 2


async def test_row_is_asked_again_when_its_time_has_come() -> None:
    clients, link, now_ns = Clients(), NeverCompiles(CONFIG), [0]
    loop = a_loop(clients, Scheduler(CONFIG), link, now_ns=lambda: now_ns[0])
    running = asyncio.ensure_future(loop.run())
    loop.readmit(a_request(1, grammar=SCHEMA))
    await until(clients, lambda: bool(link.num_steps and loop.scheduler.ask_again_at_ns))
    assert link.num_steps == 1
    now_ns[0] = loop.scheduler.ask_again_at_ns or 0
    await until(clients, lambda: link.num_steps == 2)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_request_ends_when_its_grammar_is_never_compiled() -> None:
    clients, link = Clients(), NeverCompiles(CONFIG)
    seconds = count(0, 2)
    loop = a_loop(clients, Scheduler(CONFIG), link, now_ns=lambda: next(seconds) * 10**9)
    running = asyncio.ensure_future(loop.run())
    request = a_request(1, grammar=SCHEMA)
    loop.readmit(request)
    await until(clients, lambda: clients.finished == ["r1"])
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert request.error == ("ROW_FAILED", "the executor has not compiled its grammar in 60 s")
    assert link.num_steps < 20
    assert not loop.scheduler.num_running
