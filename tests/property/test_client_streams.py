"""However a client's stream ends, its requests end and nothing of it is left.

Clients follow scripts, against a scheduler whose executor holds its steps: so nothing ends because
its tokens were all there, unless the script lets some steps go on.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc.aio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler_service.config import ClusterConfig
from splitserve.scheduler.v1 import scheduler_pb2 as api
from tests.contract.stranger.process import poll
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.processes.fake_service import StepWatch
from tests.support.processes.patience import PATIENCE_S
from tests.support.processes.scheduler_in_process import SchedulerInProcess, scheduler_in_process

NUM_EXAMPLES = int(os.environ.get("SPLITSERVE_TEST_EXAMPLES", "25"))
SERVICE = "/splitserve.scheduler.v1.SchedulerService"
FAULTY = "our own code fails"

# The requests of scripts. A request_id is shared by all that give it.
REQUESTS: dict[str, api.GenerateRequest] = {
    "plain": api.GenerateRequest(prompt_token_ids=[1, 2, 3]),
    "long": api.GenerateRequest(prompt_token_ids=range(100)),
    "several": api.GenerateRequest(
        prompt_token_ids=[4], sampling_params=api.SamplingParams(n=3, num_logprobs=2)
    ),
    "best": api.GenerateRequest(
        prompt_token_ids=[5], sampling_params=api.SamplingParams(best_of=3, max_tokens=2)
    ),
    "named": api.GenerateRequest(prompt_token_ids=[6], request_id="named"),
    "refused": api.GenerateRequest(),
    "too long": api.GenerateRequest(prompt_token_ids=range(1000)),
    "faulty": api.GenerateRequest(prompt_token_ids=[7], tenant=FAULTY),
}
UNDECODABLE = b"\x0c\xff\xff"

# What a client does: its name, and what with.
Action: TypeAlias = tuple[Any, ...]
sessions = st.integers(0, 2)
handles = st.integers(0, 3)
kinds = st.sampled_from(sorted(REQUESTS))
actions = st.one_of(
    st.tuples(st.just("submit"), sessions, handles, kinds),
    st.tuples(st.just("abort"), sessions, handles),
    st.tuples(st.just("raw"), sessions, st.sampled_from([UNDECODABLE, UNDECODABLE * 999, b""])),
    st.tuples(st.just("half_close"), sessions),
    st.tuples(st.just("reset"), sessions),
    st.tuples(st.just("generate"), kinds),
    st.tuples(st.just("generate_raw")),
    st.tuples(st.just("stop_generate")),
    st.tuples(st.just("abort_named")),
    st.tuples(st.just("steps"), st.integers(1, 4)),
    st.tuples(st.just("turns"), st.integers(1, 8)),
)


@dataclass
class Clients:
    """The calls of a script; whatever they say is as good as anything else."""

    channel: grpc.aio.Channel
    watch: StepWatch
    sessions: dict[int, Any] = field(default_factory=dict)
    generates: list[Any] = field(default_factory=list)

    async def follow(self, script: list[Action]) -> None:
        """Does all of it, and then goes away without a word."""
        for name, *arguments in script:
            # What is sent to a call that has ended is lost.
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
                await getattr(self, f"_{name}")(*arguments)
        for call in (*self.sessions.values(), *self.generates):
            call.cancel()

    async def _submit(self, number: int, handle: int, kind: str) -> None:
        submit = api.SessionSubmit(handle=handle, request=REQUESTS[kind])
        await self._send(number, api.SessionRequest(submit=submit).SerializeToString())

    async def _abort(self, number: int, handle: int) -> None:
        abort = api.SessionAbort(handle=handle)
        await self._send(number, api.SessionRequest(abort=abort).SerializeToString())

    async def _raw(self, number: int, message: bytes) -> None:
        await self._send(number, message)

    async def _send(self, number: int, message: bytes) -> None:
        if number not in self.sessions or self.sessions[number].done():
            self.sessions[number] = self.channel.stream_stream(f"{SERVICE}/Session")()
        await self.sessions[number].write(message)

    async def _half_close(self, number: int) -> None:
        if number in self.sessions:
            await self.sessions[number].done_writing()

    async def _reset(self, number: int) -> None:
        if number in self.sessions:
            self.sessions[number].cancel()

    async def _generate(self, kind: str) -> None:
        method = self.channel.unary_stream(f"{SERVICE}/Generate")
        self.generates.append(method(REQUESTS[kind].SerializeToString()))

    async def _generate_raw(self) -> None:
        self.generates.append(self.channel.unary_stream(f"{SERVICE}/Generate")(UNDECODABLE))

    async def _stop_generate(self) -> None:
        if self.generates:
            self.generates[0].cancel()

    async def _abort_named(self) -> None:
        request = api.AbortRequest(request_id="named").SerializeToString()
        await self.channel.unary_unary(f"{SERVICE}/Abort")(request, timeout=PATIENCE_S)

    async def _steps(self, number: int) -> None:
        self.watch.hold(after=number)
        await self._turns(number)

    async def _turns(self, number: int) -> None:
        for _ in range(number):
            await asyncio.sleep(0)


def what_is_left(scheduler: SchedulerInProcess) -> str:
    """Requests, streams and tasks that somebody still has; empty if there are none."""
    delivery = scheduler.cluster.delivery
    left = {
        "requests": scheduler.cluster.num_unfinished,
        "streams": len(delivery.streams),
        "sinks": len(delivery.sinks),
        "unread bytes": delivery.unread.num_bytes,
        "handlers": sum(SERVICE in task.get_name() for task in asyncio.all_tasks()),
        "readers": sum("SchedulerServicer." in repr(task) for task in asyncio.all_tasks()),
    }
    return ", ".join(f"{count} {name}" for name, count in left.items() if count)


async def wait_until_nothing(left: Callable[[], object]) -> None:
    """Raises TimeoutError, which says what is `left`."""

    async def ask() -> tuple[bool, object]:
        await asyncio.sleep(0)
        answer = left()
        return not answer, answer

    await poll(ask, PATIENCE_S)


def fails_for_faulty(submit: Callable[..., Any]) -> Callable[..., Any]:
    """A `submit` with a fault of ours in it, after the request was taken."""

    def submit_or_fail(request: Any, *arguments: Any) -> Any:  # noqa: ANN401
        result = submit(request, *arguments)
        if request.scheduling.tenant == FAULTY:
            raise RuntimeError(FAULTY)
        return result

    return submit_or_fail


async def run(script: list[Action]) -> None:
    watch = StepWatch()
    executor = FakeExecutor(fault=watch)
    config = ClusterConfig(reconnect_timeout_s=0.1, max_num_waiting=6, max_num_seqs=8)
    async with scheduler_in_process(executor, config=config) as scheduler:
        watch.hold()
        cluster = scheduler.cluster
        cluster.submit = fails_for_faulty(cluster.submit)  # type: ignore[method-assign]
        try:
            async with grpc.aio.insecure_channel(scheduler.address) as channel:
                clients = Clients(channel, watch)
                await clients.follow(script)
                await wait_until_nothing(lambda: what_is_left(scheduler))
        finally:
            watch.release()
        core = cluster.executors[0].engine
        await wait_until_nothing(lambda: executor.num_device_blocks - core.num_free_blocks)


@settings(max_examples=NUM_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(script=st.lists(actions, min_size=1, max_size=20))
def test_nothing_is_left_when_clients_have_done_what_they_like(script: list[Action]) -> None:
    logging.disable(logging.CRITICAL)  # of faults of ours
    try:
        asyncio.run(run(script))
    finally:
        logging.disable(logging.NOTSET)
