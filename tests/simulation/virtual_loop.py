"""An event loop whose time is virtual, and the processes that share it.

Nothing waits: when nobody can go on, the clock jumps to the next timer. What runs is known by its
context to belong to a `Process`, which can be paused (all it would do is held, as by SIGSTOP) and
killed. Everything is in one thread and in a certain order, so the same program does the same again.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import socket
import sys
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from functools import partial
from typing import Any, TypeVar

_Result = TypeVar("_Result")
# Callbacks at one instant: more are a loop without end.
_MOST_AT_ONCE = 200_000

_PROCESS: ContextVar[Process | None] = ContextVar("simulated_process", default=None)


class Stuck(Exception):
    """Nothing will ever happen again, or nothing else."""


class Process:
    """What one operating system process would be: its tasks, and whether they may run."""

    def __init__(self, loop: VirtualLoop, host: str) -> None:
        self.host = host
        self.is_dead = False
        self.tasks: dict[asyncio.Task[Any], None] = {}  # in order, as a set is not
        self._loop = loop
        self._is_paused = False
        self._held: list[_Handle] = []
        self.context = copy_context()
        self.context.run(_PROCESS.set, self)

    @property
    def is_paused(self) -> bool:
        """Whether what it would do is held."""
        return self._is_paused

    def start(self, main: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Runs `main` in it."""
        return self._loop.create_task(main, context=self.context.copy())

    def call(self, function: Callable[..., _Result], *arguments: object) -> _Result:
        """Calls `function` as if a task of it did."""
        return self.context.copy().run(function, *arguments)

    def pause(self) -> None:
        """As SIGSTOP."""
        self._is_paused = True

    def resume(self) -> None:
        """As SIGCONT: what was held goes on, in its order."""
        self._is_paused = False
        held, self._held = self._held, []
        self._loop.requeue(held)

    def kill(self) -> None:
        """Ends all its tasks. What they still do reaches nobody: the network has let go of it."""
        self.is_dead = True
        self.resume()
        for task in list(self.tasks):
            task.cancel()

    def hold(self, handle: _Handle) -> None:
        """Keeps what it would do while it is paused."""
        self._held.append(handle)


def current_process() -> Process:
    """Whose code runs."""
    process = _PROCESS.get()
    assert process is not None, "this is done by processes alone"
    return process


def process_name() -> str:
    """For the log; empty for the world itself."""
    process = _PROCESS.get()
    return "" if process is None else process.host


class _Handle(asyncio.TimerHandle):
    """A callback, to be run once."""

    __slots__ = ("call", "process")

    def __init__(
        self,
        when: float,
        call: Callable[[], object],
        process: Process | None,
    ) -> None:
        # Not that of the base: there is no loop to be told of it.
        self._when = when
        self.process = process
        self.call: Callable[[], object] | None = call

    def cancel(self) -> None:
        self.call = None

    def cancelled(self) -> bool:
        return self.call is None

    def when(self) -> float:
        return self._when

    def __repr__(self) -> str:
        return f"<call {self.call} at {self._when}>"


class VirtualLoop(asyncio.AbstractEventLoop):
    """See the top of this file. `errors`: what callbacks and forgotten tasks raised."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.num_calls = 0
        # Raises OSError if a connection to this address (`host:port`) is not made.
        self.on_connect: Callable[[str], Awaitable[None]] | None = None
        self._now_s = 0.0
        self._num_calls_now = 0
        self._ready: deque[_Handle] = deque()
        self._timers: list[tuple[float, int, _Handle]] = []
        self._numbers = itertools.count()
        self._is_running = False
        self._is_closed = False

    # -- what asyncio asks of a loop -------------------------------------------------------------

    def time(self) -> float:
        return self._now_s

    def call_soon(
        self, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> asyncio.Handle:
        handle = self._handle(self._now_s, callback, args, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self,
        delay: float,
        callback: Callable[..., object],
        *args: object,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: object,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = self._handle(when, callback, args, context)
        heapq.heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    @staticmethod
    def _handle(
        when: float,
        callback: Callable[..., object],
        args: tuple[object, ...],
        context: Context | None,
    ) -> _Handle:
        context = copy_context() if context is None else context
        return _Handle(when, partial(context.run, callback, *args), context.get(_PROCESS))

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Any,  # noqa: ANN401
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name, context=context)
        process = _PROCESS.get() if context is None else context.get(_PROCESS)
        if process is not None:
            tasks = process.tasks
            tasks[task] = None
            task.add_done_callback(lambda done: tasks.pop(done, None))
        return task

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]  # noqa: ANN401
        """There are no threads: it is done at once."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    async def getaddrinfo(self, host: Any, port: Any, **_rest: Any) -> Any:  # noqa: ANN401
        """All hosts are addresses already."""
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, port))]

    async def sock_connect(self, sock: socket.socket, address: Any) -> None:  # noqa: ANN401
        """Nothing goes through the socket: it only tells whether somebody listens."""
        assert self.on_connect is not None, "there is a network"
        await self.on_connect(f"{address[0]}:{address[1]}")

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(f"{context.get('message')}: {context.get('exception')!r}")

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._is_running

    def is_closed(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        self._is_closed = True
        self._ready.clear()
        self._timers.clear()

    # -- running ---------------------------------------------------------------------------------

    def run_until_complete(self, future: Any) -> Any:  # noqa: ANN401
        """Runs until `future` is done. Raises Stuck if that can never be."""
        task = asyncio.ensure_future(future, loop=self)
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(finalizer=self._close_generator)
        asyncio._set_running_loop(self)
        self._is_running = True
        try:
            while not task.done():
                self._run_once()
        finally:
            self._is_running = False
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)
        return task.result()

    def requeue(self, handles: list[_Handle]) -> None:
        """Runs these after what is to be run now."""
        self._ready.extend(handles)

    def _run_once(self) -> None:
        if not self._ready:
            if not self._timers:
                raise Stuck("nobody can go on, and nothing will happen by itself")
            if self._timers[0][0] > self._now_s:
                self._now_s, self._num_calls_now = self._timers[0][0], 0
        while self._timers and self._timers[0][0] <= self._now_s:
            self._ready.append(heapq.heappop(self._timers)[2])
        while self._ready:
            self._run(self._ready.popleft())
            self.num_calls += 1
            self._num_calls_now += 1
            if self._num_calls_now > _MOST_AT_ONCE:
                raise Stuck(f"{_MOST_AT_ONCE} calls at {self._now_s:.6f}, and no end of it")

    def _run(self, handle: _Handle) -> None:
        call, process = handle.call, handle.process
        if call is None:
            return
        if process is not None and process.is_paused:
            process.hold(handle)
            return
        try:
            call()
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            self.call_exception_handler({"message": "a callback failed", "exception": error})

    def _close_generator(self, generator: AsyncGenerator[Any, None]) -> None:
        if not self._is_closed:
            self.create_task(generator.aclose())


def new_loop() -> VirtualLoop:
    """A loop that begins at 0 s. What it does not have (sockets, signals) is not there at all."""
    return VirtualLoop()  # type: ignore[abstract]
