"""Starts the processes of `splitserve serve`, watches them, restarts them, and stops them."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Sequence

from splitserve_cli.child import Child, describe_exit
from splitserve_cli.progress import showing_progress
from splitserve_cli.serve_config import ServeConfig

_EXECUTOR_GRACE_S = 5.0
# Beyond the time that these give unfinished requests.
_SCHEDULER_GRACE_S = 3.0
_GATEWAY_GRACE_S = 3.0
_FIRST_RESTART_S = 0.5
_MAX_RESTART_S = 30.0
# A process that ran for this long did not fail because of how it was started.
_STABLE_AFTER_S = 60.0


class Supervisor:
    """Owns the processes from start to stop; `run` is its whole life."""

    def __init__(
        self,
        config: ServeConfig,
        scheduler: Child,
        executors: Sequence[Child],
        gateway: Child | None = None,
    ) -> None:
        self._config = config
        self._scheduler = scheduler
        self._executors = tuple(executors)
        self._gateways = () if gateway is None else (gateway,)
        self._children = (scheduler, *executors, *self._gateways)
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """Serves until Ctrl-C or SIGTERM; a second one kills. Returns the exit code.

        0 after a stop; 1 if a process ended before the server could take requests.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        try:
            for child in self._children:
                await child.start()
            failure = await self._wait_until_serving()
            if failure:
                sys.stderr.write(f"splitserve serve: {failure}\n")
                return 1
            await self._serve()
            return 0
        finally:
            async with showing_progress("stopping"):
                await self._stop_children()

    def _on_signal(self) -> None:
        if self._stop.is_set():
            for child in self._children:
                child.kill()
        self._stop.set()

    async def _wait_until_serving(self) -> str:
        """Returns why it will never serve; empty once it does, or if it is to stop."""
        from splitserve_cli.welcome import wait_until_serving  # gRPC takes its time

        stop = asyncio.create_task(self._stop.wait())
        serving = asyncio.create_task(wait_until_serving(self._config))
        ends = {asyncio.create_task(child.wait()): child for child in self._children}
        async with showing_progress(f"loading model {self._config.model}"):
            done, pending = await asyncio.wait(
                {stop, serving, *ends}, return_when=asyncio.FIRST_COMPLETED
            )
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        if stop in done or serving in done:
            return ""
        ended = next(task for task in ends if task in done)
        how = describe_exit(ended.result())
        return f"{ends[ended].name} ended before the model was served ({how}); see above"

    async def _serve(self) -> None:
        if self._stop.is_set():
            return
        from splitserve_cli.welcome import welcome

        tasks = [asyncio.create_task(self._keep_alive(child)) for child in self._children]
        tasks.append(asyncio.create_task(welcome(self._config)))
        await self._stop.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_alive(self, child: Child) -> None:
        """Starts `child` again whenever it ends, with pauses that grow while it keeps failing."""
        delay_s = _FIRST_RESTART_S
        while True:
            started_at = time.monotonic()
            how = describe_exit(await child.wait())
            if time.monotonic() - started_at > _STABLE_AFTER_S:
                delay_s = _FIRST_RESTART_S
            sys.stderr.write(
                f"splitserve serve: {child.name} ended ({how}); starting it again in"
                f" {delay_s:g} s\n"
            )
            sys.stderr.flush()
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, _MAX_RESTART_S)
            await child.start()

    async def _stop_children(self) -> None:
        """From the outside in: what one still has to finish needs the next."""
        grace_s = self._config.drain_timeout_s + _GATEWAY_GRACE_S
        await asyncio.gather(*(child.stop(grace_s) for child in self._gateways))
        await self._scheduler.stop(self._config.drain_timeout_s + _SCHEDULER_GRACE_S)
        await asyncio.gather(*(child.stop(_EXECUTOR_GRACE_S) for child in self._executors))
