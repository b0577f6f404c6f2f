"""A fake service for tests that are not in Python; `python -m` runs it.

A scheduler process with a fake executor, behind a proxy whose connections can be cut. The first
line of its output is `{"address": ..., "proxy": ...}`. Then it takes one command a line,
`{"do": NAME, ...}`, and answers each with `{"result": ...}` or `{"error": ...}`. It ends with its
input; the exit status is 0 if no executor was asked to read what is not there.
"""

from __future__ import annotations

import asyncio
import json
import sys
import traceback
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from typing import Any

from splitserve_client import BeamSearch, EarlyStopping, SamplingParams
from splitserve_client.errors import error_of_failure, error_of_reason
from splitserve_rpc.errors import CODE_OF_REASON, RpcFailure
from tests.contract.stranger.process import poll, running_scheduler
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.fakes.fake_logprobs import fake_logprob
from tests.support.fakes.fake_truth import expected_completions
from tests.support.processes.addresses import reserve_address
from tests.support.processes.cut_proxy import CutProxy, cut_proxy
from tests.support.processes.fake_service import FakeService, StepWatch, fake_service

_OPTIONS: dict[str, object] = {"max_num_waiting": 8, "reconnect_timeout_s": 0.1}


@dataclass(frozen=True, slots=True)
class StdioService:
    """The commands: every public method is one, its arguments are those of the message."""

    service: FakeService
    proxy: CutProxy
    watch: StepWatch
    stack: AsyncExitStack

    async def expect(self, prompt: list[int], params: dict[str, Any]) -> list[dict[str, Any]]:
        """What a client must get, by the names of Python."""
        completions = expected_completions(prompt, _params_of(params))
        return [asdict(each) | {"reason": each.reason.value} for each in completions]

    async def score(self, token_ids: list[int]) -> list[float]:
        """The logprob of each token."""
        return [fake_logprob(token_id) for token_id in token_ids]

    async def list_errors(self) -> dict[str, list[object]]:
        """For each reason: the error's class, its class in-band, and the status code."""
        return {
            reason: [
                type(error_of_failure(RpcFailure(code, reason, "", None))).__name__,
                type(error_of_reason(reason, "")).__name__,
                code.value[0],
            ]
            for reason, code in CODE_OF_REASON.items()
        }

    async def hold(self, after: int) -> None:
        """Lets `after` more steps begin, and holds the next one."""
        self.watch.hold(after)

    async def wait_held(self) -> None:
        """Waits until a step is held."""
        await self.watch.wait_held()

    async def release(self) -> None:
        """Lets all steps go on."""
        self.watch.release()

    async def count_steps(self) -> int:
        """How many steps began so far."""
        return len(self.watch.steps)

    async def wait_idle(self) -> None:
        """Waits until no request is anywhere and every block is free."""
        await self.service.wait_idle()

    async def cut(self) -> int:
        """Resets what goes through the proxy; how many connections there were so far."""
        self.proxy.cut()
        return self.proxy.num_cuts

    async def wait_disconnected(self) -> None:
        """Waits until nobody is connected through the proxy."""

        async def ask() -> tuple[bool, None]:
            return self.proxy.is_idle, None

        await poll(ask)

    async def kill_scheduler(self) -> None:
        """By SIGKILL."""
        process = self.service.scheduler.process
        process.kill()
        await asyncio.to_thread(process.wait)

    async def start_scheduler(self) -> None:
        """Starts a successor at the same address; returns when it listens."""
        address = self.service.scheduler.address
        await self.stack.enter_async_context(running_scheduler(listen=address, **_OPTIONS))


def _params_of(params: dict[str, Any]) -> SamplingParams:
    """Numbers of 64 bits come as text."""
    values = dict(params)
    values["seed"] = int(values["seed"])
    if "beam_search" in values:
        beams = values["beam_search"]
        stopping = EarlyStopping(beams.get("early_stopping", "heuristic"))
        values["beam_search"] = BeamSearch(beams["width"], beams.get("length_penalty"), stopping)
    if "stop_token_ids" in values:
        values["stop_token_ids"] = tuple(values["stop_token_ids"])
    return SamplingParams(**values)


async def _answer(commands: StdioService, line: str) -> dict[str, object]:
    message = json.loads(line)
    command: Callable[..., Awaitable[object]] = getattr(commands, message.pop("do"))
    try:
        return {"result": await command(**message)}
    except Exception:
        return {"error": traceback.format_exc()}


async def main() -> None:
    """Serves until the input ends."""
    watch = StepWatch()
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(
            fake_service(FakeExecutor(fault=watch), listen=reserve_address(), **_OPTIONS)
        )
        address = service.scheduler.address
        proxy = await stack.enter_async_context(cut_proxy(address))
        commands = StdioService(service, proxy, watch, stack)
        _say({"address": address, "proxy": proxy.address})
        while line := await asyncio.to_thread(sys.stdin.readline):
            _say(await _answer(commands, line))


def _say(message: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main())
