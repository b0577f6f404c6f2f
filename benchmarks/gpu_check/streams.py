"""Many streams over one Session: how many tokens come, and how long streams wait for the next."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc.aio

from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve.scheduler.v1 import scheduler_pb2_grpc
from splitserve_rpc import channel_options

_WARM_UP_TIMEOUT_S = 90


@dataclass(frozen=True, slots=True)
class Streams:
    """`is_cut`: they are sampled with top-p, else greedily. `vocab_size`: of the model."""

    num_streams: int
    num_prompt_tokens: int
    max_tokens: int
    is_cut: bool
    vocab_size: int


@dataclass(slots=True)
class Seen:
    """`first_s`, `gap_s`: until a request's first token, and from each token to its next."""

    num_tokens: int = 0
    first_s: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)


class Load:
    """Keeps streams running: where one ends the next begins."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._to_send: asyncio.Queue[int] = asyncio.Queue()
        self._asked_s: dict[int, float] = {}
        self._last_s: dict[int, float] = {}
        self.seen = Seen()

    @property
    def num_begun(self) -> int:
        """Streams that have a token by now."""
        return len(self._last_s)

    async def run(self, address: str) -> None:
        """Until cancelled. Raises RuntimeError if a request is refused."""
        for handle in range(1, self._streams.num_streams + 1):
            self._to_send.put_nowait(handle)
        async with grpc.aio.insecure_channel(address, channel_options()) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            async for response in stub.Session(self._requests()):
                self._count(response, time.perf_counter())

    def _count(self, response: api.SessionResponse, now: float) -> None:
        self.seen.num_tokens += len(response.handles)
        for handle in set(response.handles):
            last = self._last_s.get(handle)
            if last is None:
                self.seen.first_s.append(now - self._asked_s[handle])
            else:
                self.seen.gap_s.append(now - last)
            self._last_s[handle] = now
        for event in response.events:
            if event.HasField("rejected"):
                raise RuntimeError(f"a request was refused: {event.rejected}")
            if event.HasField("finish"):
                self._last_s.pop(event.handle, None)
                self._asked_s.pop(event.handle, None)
                self._to_send.put_nowait(event.handle + self._streams.num_streams)

    async def _requests(self) -> AsyncIterator[api.SessionRequest]:
        while True:
            handle = await self._to_send.get()
            self._asked_s[handle] = time.perf_counter()
            yield api.SessionRequest(submit=self._submit(handle))

    def _submit(self, handle: int) -> api.SessionSubmit:
        streams = self._streams
        params = api.SamplingParams(temperature=0.0, ignore_eos=True)
        if streams.is_cut:
            params = api.SamplingParams(temperature=0.7, top_p=0.8, top_k=20, ignore_eos=True)
        # Ends are spread, so that not all begin anew at once.
        params.max_tokens = streams.max_tokens - handle % 7 * streams.max_tokens // 16
        # No two begin alike: what one computed does not serve another.
        prompt = [(handle * 7919 + 31 * index) % (streams.vocab_size - 3) + 3
                  for index in range(streams.num_prompt_tokens)]  # fmt: skip
        request = api.GenerateRequest(
            request_id=f"gpu-check-{handle}", prompt_token_ids=prompt, sampling_params=params
        )
        return api.SessionSubmit(handle=handle, request=request)


async def measure(address: str, streams: Streams, seconds: float) -> tuple[float, Seen]:
    """Tokens a second over so many seconds in which all streams have begun, and what was seen."""
    load = Load(streams)
    running = asyncio.create_task(load.run(address))
    try:
        end = time.monotonic() + _WARM_UP_TIMEOUT_S
        while load.num_begun < streams.num_streams and time.monotonic() < end:
            await _pause(running, 0.05)
        await _pause(running, seconds / 4)
        at_start, load.seen = load.seen, Seen()
        started = time.perf_counter()
        await _pause(running, seconds)
        elapsed_s = time.perf_counter() - started
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    load.seen.first_s = load.seen.first_s or at_start.first_s
    return load.seen.num_tokens / elapsed_s, load.seen


async def _pause(running: asyncio.Task[None], seconds: float) -> None:
    """Raises what `running` raised."""
    done, _ = await asyncio.wait([running], timeout=seconds)
    for task in done:
        task.result()
        raise RuntimeError("the session has ended")
