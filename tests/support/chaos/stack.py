"""A real stack whose parts can die: schedulers, executors over a bad network, gateways."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx2

from splitserve_client import AsyncClient, ClientConfig, Executor, ExecutorList, SplitserveError
from tests.contract.stranger.process import poll
from tests.support.chaos.network import Network
from tests.support.processes.addresses import reserve_address
from tests.support.processes.forked import ROOT, ForkedProcess, start_process
from tests.support.processes.patience import PATIENCE_S, PATIENT
from tests.support.processes.processes import wait_ready

BUNDLED = ROOT / "executor_service" / "bundled_model"
# Few, so that requests preempt each other while an executor is away.
NUM_DEVICE_BLOCKS, NUM_HOST_BLOCKS = 192, 64
NUM_GATEWAYS = 2
# Shorter than most answers take, so that stopping a process ends some in their middle.
_DRAIN_S = "0.5"
_EXECUTOR_OPTIONS = (
    *("--model", str(BUNDLED), "--dtype", "float32", "--deterministic", "--log-level", "info"),
    *("--num-host-blocks", str(NUM_HOST_BLOCKS)),
    # Soon back at the scheduler that it prefers, and soon away when it is told to stop.
    *("--move-after-s", "1", "--drain-timeout-s", _DRAIN_S),
)

_EXECUTOR = "tests.support.chaos.rigged_executor"
_OWN_SESSION = "tests.support.chaos.own_session"

# Of those that ask a scheduler how it is: it may be dead, and is asked again.
_ASKING = ClientConfig(connect_timeout_s=2.0)

Lists = Sequence[ExecutorList]


@dataclass
class Stack:
    """What runs. Whatever is started or ended twice stays as it is.

    `clients`: of all schedulers. `operators`: of each scheduler. `https`: of each gateway.
    `sessions`: of all processes that ever began, whose descendants are in them.
    """

    network: Network
    folder: Path
    num_executors: int
    scheduler_options: Sequence[str]
    addresses: Sequence[str]
    http_addresses: Sequence[str]
    clients: Sequence[AsyncClient]
    operators: Sequence[AsyncClient]
    https: Sequence[httpx2.AsyncClient]
    num_device_blocks: int = NUM_DEVICE_BLOCKS
    processes: dict[str, ForkedProcess] = field(default_factory=dict)
    sessions: set[int] = field(default_factory=set)
    # When the life of each executor began; its epoch is later.
    began_ns: dict[str, int] = field(default_factory=dict)
    # Of whoever ended while this was not looking, by any other way than it was asked to.
    crashes: list[str] = field(default_factory=list)
    # Whoever was told to stop, and may take its time.
    _stopped: set[str] = field(default_factory=set)
    # Whoever is being killed or started: nobody begins in its place before that is over.
    _changing: set[str] = field(default_factory=set)

    # -- who lives ---------------------------------------------------------------------------------

    @property
    def executor_names(self) -> list[str]:
        """Of all that there are to be."""
        return [f"executor-{index}" for index in range(self.num_executors)]

    @property
    def scheduler_names(self) -> list[str]:
        """Of all that there are to be."""
        return [f"scheduler-{index}" for index in range(len(self.addresses))]

    @property
    def gateway_names(self) -> list[str]:
        """Of all that there are to be."""
        return [f"gateway-{index}" for index in range(len(self.http_addresses))]

    async def start(self, name: str) -> None:
        """Starts a process by its name."""
        kind, _, index = name.partition("-")
        match kind:
            case "scheduler":
                await self._start_scheduler(int(index))
            case "gateway":
                await self._start_gateway(int(index))
            case "executor":
                await self.start_executor(int(index))

    def journal(self, name: str) -> Path:
        """Of a scheduler."""
        return self.folder / f"{name}.journal"

    async def _start_scheduler(self, index: int) -> None:
        name, address = self.scheduler_names[index], self.addresses[index]
        listen = ("--listen", address, "--cluster-listen", self.network.cluster_listens[index])
        journal = ("--journal", str(self.journal(name)), "--journal-max-mib", "4")
        rest = ["--speculation", "prompt-lookup", "--drain-timeout-s", _DRAIN_S]
        if others := [other for other in self.addresses if other != address]:
            rest += ["--peers", ",".join(others)]
        options = (*self.network.scheduler_options, *rest, *self.scheduler_options)
        await self._start(name, _OWN_SESSION, "scheduler_service", *listen, *journal, *options)

    async def _start_gateway(self, index: int) -> None:
        listen = ("--schedulers", ",".join(self.addresses), "--http", self.http_addresses[index])
        rest = ("--log-level", "info", "--drain-timeout-s", _DRAIN_S)
        name = self.gateway_names[index]
        await self._start(name, _OWN_SESSION, "splitserve_gateway", *listen, *rest)

    async def start_executor(self, index: int) -> None:
        name, place = self.executor_names[index], self.network.place(index)
        if not self._is_missing(name):
            return
        where = ["--listen", place.listen, "--advertise-address", place.advertise]
        where += ["--scheduler", ",".join(place.schedulers), *place.options]
        options = [*where, "--num-device-blocks", str(self.num_device_blocks), *_EXECUTOR_OPTIONS]
        self.began_ns[place.advertise] = time.time_ns()
        arguments = [str(place.namespace or 0), str(self.sickness(name)), *options]
        await self._start(name, _EXECUTOR, *arguments)
        await self.network.executor_began(index)

    async def _start(self, name: str, module: str, *options: str) -> None:
        if self._is_missing(name):
            with self._change(name):
                self._note(name, await asyncio.to_thread(self._fork, name, module, options))

    def _fork(self, name: str, module: str, options: Sequence[str]) -> ForkedProcess:
        with self.log(name).open("ab") as log, open(os.devnull, "rb") as nothing:
            return start_process(module, options, stdin=nothing.fileno(), stderr=log.fileno())

    def _note(self, name: str, process: ForkedProcess) -> None:
        before = self.processes.get(name)
        expected = 0 if name in self._stopped else -signal.SIGKILL
        if before is not None and before.poll() != expected:
            self.crashes.append(f"{name} ended with {before.poll()}; expected: {expected}")
        self._stopped.discard(name)
        self.processes[name] = process
        self.sessions.add(process.pid)

    def log(self, name: str) -> Path:
        """What it writes to standard error, in all its lives."""
        return self.folder / f"{name}.log"

    def sickness(self, name: str) -> Path:
        """A file that says what is wrong with an executor, while it is there (`Sickness`)."""
        return self.folder / f"{name}.sickness"

    def is_alive(self, name: str) -> bool:
        process = self.processes.get(name)
        return process is not None and process.poll() is None

    def _is_missing(self, name: str) -> bool:
        return not self.is_alive(name) and name not in self._changing

    @contextmanager
    def _change(self, name: str) -> Iterator[None]:
        self._changing.add(name)
        try:
            yield
        finally:
            self._changing.discard(name)

    def pid(self, name: str) -> int:
        """Of its present or last life."""
        return self.processes[name].pid

    def signal(self, name: str, number: signal.Signals) -> None:
        """Harmless if it has ended."""
        if self.is_alive(name):
            with suppress(ProcessLookupError):
                os.kill(self.pid(name), number)

    async def kill(self, name: str) -> None:
        """Ends a life by SIGKILL."""
        with self._change(name):
            self.signal(name, signal.SIGKILL)
            await self.wait_ended(name)
            if name in self.executor_names:
                self.network.executor_ended(self.executor_names.index(name))

    async def stop(self, name: str) -> None:
        """Ends a life by SIGTERM, as an operator does; it drains before."""
        with self._change(name):
            self._stopped.add(name)
            self.signal(name, signal.SIGTERM)
            await self.wait_ended(name)
            if name in self.executor_names:
                self.network.executor_ended(self.executor_names.index(name))

    async def wait_ended(self, name: str) -> int:
        """Its exit code, negative for a signal."""
        process = self.processes[name]

        async def look() -> tuple[bool, int | None]:
            code = process.poll()
            return code is not None, code

        code = await poll(look, PATIENCE_S)
        assert code is not None
        return code

    async def start_missing(self) -> None:
        """Starts whoever does not live."""
        for name in (*self.scheduler_names, *self.gateway_names, *self.executor_names):
            await self.start(name)

    # -- how they are ------------------------------------------------------------------------------

    async def wait_for(self, holds: Callable[[Lists], bool]) -> Lists:
        """Asks all schedulers until `holds` of their executors. Raises TimeoutError."""

        async def ask() -> tuple[bool, Lists | SplitserveError]:
            try:
                lists = await self.executor_lists()
            except SplitserveError as error:
                return False, error
            return holds(lists), lists

        lists = await poll(ask, PATIENCE_S)
        assert not isinstance(lists, SplitserveError)
        return lists

    async def executor_lists(self) -> Lists:
        """What each scheduler says of its executors. Raises SplitserveError."""
        asking = (operator.list_executors() for operator in self.operators)
        return await asyncio.gather(*asking)

    async def wait_ready(self) -> None:
        """Waits until everybody serves, in the present life."""
        await self.wait_for(self._are_all_connected)
        for http in self.https:
            await wait_ready(http)

    def _are_all_connected(self, lists: Lists) -> bool:
        epochs = dict[str, int]()
        for executor in _connected(lists):
            epoch = max(executor.executor_epoch, epochs.get(executor.address, 0))
            epochs[executor.address] = epoch
        return all(epochs.get(at, 0) >= began_ns for at, began_ns in self.began_ns.items())

    def are_all_well(self, lists: Lists) -> bool:
        """Whether all are where they prefer to be, and none fails."""
        for index, listed in enumerate(lists):
            own = {
                self.network.place(number).advertise
                for number in range(self.num_executors)
                if number % len(lists) == index
            }
            if own != {executor.address for executor in _connected([listed])}:
                return False
        is_any_failing = any(executor.is_failing for executor in _connected(lists))
        return self._are_all_connected(lists) and not is_any_failing

    async def wait_idle(self) -> None:
        """Waits until no request is anywhere and every block of every executor is free."""
        await self.wait_for(
            lambda lists: (
                all(listed.num_unassigned_requests == 0 for listed in lists)
                and self._are_all_connected(lists)
                and all(
                    e.num_running_requests == e.num_waiting_requests == e.num_swapped_requests == 0
                    and e.num_free_device_blocks == e.num_device_blocks
                    and e.num_free_host_blocks == e.num_host_blocks
                    for e in _connected(lists)
                )
            )
        )

    async def stop_all(self) -> dict[str, int]:
        """Asks all to end, as an operator does; what each ends with."""
        for name in (*self.gateway_names, *self.executor_names, *self.scheduler_names):
            self.signal(name, signal.SIGTERM)
        return {name: await self.wait_ended(name) for name in self.processes}


def _connected(lists: Lists) -> list[Executor]:
    return [executor for listed in lists for executor in listed.executors if executor.is_connected]


@asynccontextmanager
async def running_stack(
    network: Network,
    folder: Path,
    *scheduler_options: str,
    num_executors: int = 3,
    num_device_blocks: int = NUM_DEVICE_BLOCKS,
) -> AsyncIterator[Stack]:
    """All of it, ready; whoever still lives afterwards is killed."""
    addresses = [reserve_address() for _ in network.cluster_listens]
    http_addresses = [reserve_address() for _ in range(NUM_GATEWAYS)]
    async with AsyncExitStack() as clients:
        stack = Stack(
            network,
            folder,
            num_executors,
            scheduler_options,
            addresses,
            http_addresses,
            # As many as gateways: each begins at any scheduler.
            [
                await clients.enter_async_context(AsyncClient(",".join(addresses), PATIENT))
                for _ in http_addresses
            ],
            [
                await clients.enter_async_context(AsyncClient(listen, _ASKING))
                for listen in network.cluster_listens
            ],
            [
                await clients.enter_async_context(
                    httpx2.AsyncClient(
                        base_url=f"http://{address}", timeout=PATIENCE_S, trust_env=False
                    )
                )
                for address in http_addresses
            ],
            num_device_blocks,
        )
        try:
            await stack.start_missing()
            await stack.wait_ready()
            yield stack
        finally:
            for name in stack.processes:
                stack.signal(name, signal.SIGKILL)
                await stack.wait_ended(name)
