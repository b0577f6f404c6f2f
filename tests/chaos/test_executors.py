"""Executor processes that die, hang, fail or are replaced: streams bring what they bring anyway.

Executors compute no model but in the test of drafts. They are slowed down or held until a fault has
happened, so no test has to be in time. Faults of all kinds at once are in `test_faults.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from splitserve_client import (
    AsyncClient,
    BeamSearch,
    ClientConfig,
    Completion,
    Executor,
    Readiness,
    RequestFailed,
    RetryPolicy,
    SamplingParams,
    Tokens,
)
from splitserve_options import BUNDLED_MODEL
from tests.contract.stranger.process import poll
from tests.support.fakes.expected_outputs import expected_completions
from tests.support.processes.addresses import reserve_address
from tests.support.processes.gate import GATE, GATED_EXECUTOR, GATED_SCHEDULER, Gate
from tests.support.processes.light_executor import DEADLY_REQUEST, SICKNESS
from tests.support.processes.patience import PATIENCE_S, PATIENT
from tests.support.processes.processes import LightProcesses, Processes, light_processes
from tests.support.security.cluster import Certificates

# Generous for busy machines.
pytestmark = pytest.mark.timeout(1800)

PROMPT = [5, 6, 7, 8]
SAMPLED = SamplingParams(seed=17, max_tokens=60)
KINDS = (
    SAMPLED,
    replace(SAMPLED, temperature=0.0, max_tokens=80),
    replace(SAMPLED, n=3),
    replace(SAMPLED, n=2, best_of=3),
    replace(SAMPLED, n=2, beam_search=BeamSearch(3)),
)
REQUESTS = [
    ([number, 7, *range(3, 3 + number)], KINDS[number % len(KINDS)]) for number in range(12)
]
EXPECTED = [expected_completions(prompt, params) for prompt, params in REQUESTS]


class Stream:
    """One completion; `has_started` is set after a few tokens."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.has_started = asyncio.Event()

    async def run(self, client: AsyncClient, prompt: list[int], params: SamplingParams) -> None:
        async for event in client.generate(prompt, params):
            if isinstance(event, Tokens):
                self.tokens += event.token_ids
                if len(self.tokens) >= 15:
                    self.has_started.set()


async def busiest_executor(running: Processes) -> str:
    executors = await running.wait_until(
        lambda executors: any(e.num_running_requests for e in executors)
    )
    return max(executors, key=lambda executor: executor.num_running_requests).address


async def complete_all(client: AsyncClient) -> list[tuple[Completion, ...]]:
    generations = await asyncio.gather(*(client.complete(*request) for request in REQUESTS))
    return [generation.completions for generation in generations]


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate(tmp_path / "gate")
    monkeypatch.setenv(GATE, str(gate.path))
    return gate


# -- killed, paused, replaced ----------------------------------------------------------------------


class SecuredProcesses(LightProcesses):
    """Processes that speak TLS; executors and operators use the address `cluster`."""

    def __init__(self, log: Path, certificates: Certificates) -> None:
        super().__init__(log)
        self.cluster = reserve_address()
        self._certificates = certificates
        self._operator = replace(PATIENT, credentials=certificates.client("operator"))
        self.client = replace(PATIENT, credentials=certificates.client("alice"))

    def start_scheduler(self, *options: str) -> None:
        super().start_scheduler(
            *(f"--cluster-listen={self.cluster}", *self._certificates.flags("scheduler")),
            f"--tls-client-ca={self._certificates.directory / 'ca.crt'}",
            *options,
        )

    def start_executor(self, *options: str, address: str = "") -> str:
        flags = self._certificates.flags("executor")
        return super().start_executor(
            f"--scheduler={self.cluster}", *flags, *options, address=address
        )

    async def wait_until(
        self,
        holds: Callable[[list[Executor]], bool],
        address: str = "",
        config: ClientConfig | None = None,
    ) -> list[Executor]:
        return await super().wait_until(holds, self.cluster, self._operator)


@pytest.fixture
def secured(tmp_path: Path, gate: Gate) -> Iterator[SecuredProcesses]:
    certificates = Certificates.make(tmp_path / "certificates", "--client", "alice")
    running = SecuredProcesses(tmp_path / "log", certificates)
    try:
        # Only lost connections and pings can tell of a lost executor within an hour.
        running.start_scheduler("--reconnect-timeout-s", "3600", "--step-timeout-s", "3600")
        yield running
    finally:
        running.kill_all()
    assert running.log_text() == ""


@pytest.mark.parametrize("fault", ["killed", "paused"])
async def test_stream_moves_when_its_executor_is_lost(
    secured: SecuredProcesses, gate: Gate, fault: str
) -> None:
    params = replace(SAMPLED, max_tokens=400)
    truth = list(expected_completions(PROMPT, params)[0].token_ids)
    async with AsyncClient(secured.address, secured.client) as client:
        await secured.run_executors(2)
        stream, later = Stream(), Stream()
        # The stream would take more than a minute.
        gate.slow_down(0.2)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stream.run(client, PROMPT, params))
            await stream.has_started.wait()
            lost = await busiest_executor(secured)
            (secured.kill_executor if fault == "killed" else secured.pause_executor)(lost)
            gate.release()
        assert stream.tokens == truth
        await secured.wait_until(lambda all_: lost not in {e.address for e in all_})
        if fault == "killed":
            return

        secured.resume_executor(lost)
        await secured.wait_until(lambda all_: lost in {e.address for e in all_})
        [other] = secured.executors.keys() - {lost}
        secured.kill_executor(other)
        await secured.wait_until(lambda all_: {e.address for e in all_} == {lost})
        await later.run(client, PROMPT, params)
        assert later.tokens == truth


@dataclass(slots=True)
class Load:
    """One stream of each of REQUESTS at a time, repeated until `is_over`."""

    client: AsyncClient
    num_done: int = 0
    is_over: bool = False

    async def run(self, number: int) -> None:
        while not self.is_over:
            generation = await self.client.complete(*REQUESTS[number])
            assert generation.completions == EXPECTED[number]
            self.num_done += 1


async def test_no_stream_breaks_when_all_executors_are_replaced(tmp_path: Path) -> None:
    # The client repairs no broken stream.
    impatient = replace(PATIENT, retry=RetryPolicy(give_up_after_s=-1.0))
    with light_processes(tmp_path / "log") as running:
        running.start_scheduler()
        old = [executor.address for executor in await running.run_executors(3)]
        async with AsyncClient(running.address, impatient) as client:
            load = Load(client)
            async with asyncio.TaskGroup() as tasks:
                for number in range(len(REQUESTS)):
                    tasks.create_task(load.run(number))
                for _ in old:
                    running.start_executor("--drain-timeout-s", "600")
                for address in old:
                    await running.wait_until(lambda executors: len(executors) > 3)
                    assert await running.stop_executor(address) == 0
                load.is_over = True
        now = await running.wait_until(lambda executors: len(executors) == 3)
        assert {executor.address for executor in now}.isdisjoint(old)
        assert load.num_done >= len(REQUESTS)


# -- requests that executors die of, and executors that compute nothing right ----------------------

DEADLY_SEED = 666
DEADLY = replace(SAMPLED, seed=DEADLY_SEED)
# So many tokens of the deadly request are computed without harm.
DEADLY_LENGTH = len(PROMPT) + 9


class SupervisedProcesses(LightProcesses):
    """Processes whose dead executors are replaced at other addresses, as an orchestrator does."""

    num_deaths = 0

    async def _supervise(self) -> None:
        while True:
            for address, process in list(self.executors.items()):
                if process.poll() is not None:
                    self.num_deaths += 1
                    self.kill_executor(address)
                    self.start_executor()
            await asyncio.sleep(0.05)

    @asynccontextmanager
    async def supervised(self) -> AsyncIterator[None]:
        supervising = asyncio.create_task(self._supervise())
        try:
            yield
        finally:
            supervising.cancel()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[SupervisedProcesses]:
    running = SupervisedProcesses(tmp_path / "log")
    try:
        # The duration of a step is unknown for an executor that has made none.
        running.start_scheduler("--step-timeout-s", "30")
        yield running
    finally:
        running.kill_all()
    assert "violation" not in running.log_text()


# A silent executor may be slow or out of reach: a request is isolated after two losses and blamed
# after three more alone.
@pytest.mark.parametrize(("harm", "num_executors", "max_deaths"), [("die", 3, 3), ("hang", 7, 0)])
async def test_deadly_request_fails_alone_when_executors_are_lost_with_it(
    running: SupervisedProcesses,
    monkeypatch: pytest.MonkeyPatch,
    harm: str,
    num_executors: int,
    max_deaths: int,
) -> None:
    monkeypatch.setenv(DEADLY_REQUEST, f"{harm}:{DEADLY_SEED}:{DEADLY_LENGTH}")
    await running.run_executors(num_executors)
    async with AsyncClient(running.address, PATIENT) as client, running.supervised():
        # From these the scheduler learns how long a step takes.
        assert await complete_all(client) == EXPECTED
        deadly = asyncio.create_task(client.complete(PROMPT, DEADLY))
        assert await complete_all(client) == EXPECTED
        with pytest.raises(RequestFailed) as caught:
            await deadly
        assert caught.value.reason == "EXECUTOR_LOST_REPEATEDLY"
        assert running.num_deaths <= max_deaths
        assert await complete_all(client) == EXPECTED


@pytest.mark.parametrize("kind", ["fails", "not_a_number"])
async def test_requests_fail_by_name_when_the_only_executor_is_sick(
    kind: str, running: SupervisedProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sickness = tmp_path / "sickness"
    sickness.touch()
    monkeypatch.setenv(SICKNESS, f"{kind}:{sickness}")
    await running.run_executors(1)
    async with AsyncClient(running.address, PATIENT) as client:
        for number in range(5):
            with pytest.raises(RequestFailed) as caught:
                await client.complete([9, 10, number], SAMPLED)
            assert caught.value.reason in ("INVALID_LOGITS", "EXECUTOR_LOST_REPEATEDLY")
        await wait_readiness(client, Readiness.EXECUTORS_FAILING)
        (executor,) = (await client.list_executors()).executors
        assert (executor.is_failing, executor.is_withdrawn) == (True, False)

        sickness.unlink()
        await wait_readiness(client, Readiness.READY)
        await client.complete([9, 10], SAMPLED)


async def wait_readiness(client: AsyncClient, readiness: Readiness) -> None:
    async def ask() -> tuple[bool, object]:
        model = await client.get_model()
        return model.readiness is readiness, model.readiness

    await poll(ask, PATIENCE_S)


# -- drafts of a model -----------------------------------------------------------------------------

# A vocabulary of few tokens repeats itself, so drafts are often right.
FEW = tuple(range(300, 304))
GREEDY = SamplingParams(temperature=0.0, max_tokens=96, ignore_eos=True, allowed_token_ids=FEW)
WARM = replace(GREEDY, temperature=0.5, seed=17)
DRAFTED = [
    (prompt, params)
    for prompt in ([5, 6, 7, 8] * 6, [21, 22, 23] * 8, [9] * 20)
    for params in (GREEDY, WARM, replace(WARM, allowed_token_ids=None))
]


class DraftingProcesses(Processes):
    """Executors with the bundled model that stop where the gate says."""

    executor_module = GATED_EXECUTOR

    def __init__(self, scheduler: tuple[str, ...], executor: tuple[str, ...]) -> None:
        super().__init__(Path(BUNDLED_MODEL))
        self._options = ("--dtype", "float32", "--deterministic", *executor)
        self.start_scheduler("--reconnect-timeout-s", "0.2", *GATED_SCHEDULER, *scheduler)

    def start_executor(self, *options: str, address: str = "") -> str:
        return super().start_executor(*self._options, *options, address=address)


def start_drafted(client: AsyncClient, tasks: asyncio.TaskGroup) -> list[Stream]:
    streams = [Stream() for _ in DRAFTED]
    for stream, (prompt, params) in zip(streams, DRAFTED, strict=True):
        tasks.create_task(stream.run(client, list(prompt), params))
    return streams


# Without kernels, scores depend slightly on the other rows of a step.
@pytest.mark.usefixtures("native_library")
async def test_streams_equal_undrafted_ones_when_a_drafting_executor_is_killed(gate: Gate) -> None:
    running = DraftingProcesses(("--max-run-ahead", "1"), ())
    try:
        await running.run_executors(1)
        async with AsyncClient(running.address, PATIENT) as client, asyncio.TaskGroup() as tasks:
            undrafted = start_drafted(client, tasks)
    finally:
        running.kill_all()
    running = DraftingProcesses((), ("--draft-model", "bundled"))
    try:
        await running.run_executors(2)
        gate.hold(0)
        async with AsyncClient(running.address, PATIENT) as client, asyncio.TaskGroup() as tasks:
            streams = start_drafted(client, tasks)
            await running.wait_known(len(streams))
            gate.hold(60)
            # Drafted streams reach the gate long before the others get so far.
            starts = [tasks.create_task(stream.has_started.wait()) for stream in streams]
            await asyncio.wait(starts, return_when=asyncio.FIRST_COMPLETED)
            running.kill_executor(await busiest_executor(running))
            gate.release()
        assert [stream.tokens for stream in streams] == [stream.tokens for stream in undrafted]
    finally:
        running.kill_all()
