"""`splitserve explain`, of a scheduler that runs and of its journal."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from pathlib import Path

import pytest

from scheduler_service.config import ClusterConfig
from scheduler_service.watching.explain_journal import lives_of
from scheduler_service.watching.life import Life, LifeEvent, LifeKind
from scheduler_service.watching.life_recorder import LifeRecorder
from splitserve_client import AsyncClient, RequestIdInUse, SamplingParams
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.processes.fake_service import StepWatch
from tests.support.processes.forked import run_process
from tests.support.processes.patience import PATIENCE_S
from tests.support.processes.scheduler_in_process import scheduler_in_process

REPLAYED = Path(__file__).parents[1] / "replay" / "everything.journal"


async def explain(*options: str) -> tuple[int, str]:
    """The exit code, and what it prints."""
    done = await asyncio.to_thread(run_process, "splitserve_cli", "explain", *options)
    assert done.stderr == ""
    return done.returncode, done.stdout


async def test_explain_tells_the_life_of_a_request_by_its_id_and_of_no_other() -> None:
    recorder = LifeRecorder(100, time.monotonic_ns)
    async with (
        scheduler_in_process(FakeExecutor(), watchers=[recorder]) as scheduler,
        AsyncClient(scheduler.address) as client,
    ):
        params = SamplingParams(seed=1, max_tokens=5)
        await client.complete([1, 2, 3], params, request_id="mine")
        where = f"--address={scheduler.address}"

        code, text = await explain("mine", where)
        assert (code, "first token" in text) == (0, True)
        assert "5 output tokens" in text
        code, text = await explain("mine", where, "--json")
        life = json.loads(text)["lives"][0]
        kinds = [event["kind"] for event in life["events"]]
        assert kinds == ["received", "given", "began", "first_token", "ended"]
        assert abs(life["began_at_s"] - time.time()) < 3600
        code, text = await explain("minx", where)
        assert (code, "nothing is known of minx" in text, "1 that ended" in text) == (1, True, True)


async def test_explain_next_says_what_keeps_the_first_when_all_rows_are_taken() -> None:
    watch, recorder = StepWatch(), LifeRecorder(100, time.monotonic_ns)
    config = ClusterConfig(max_num_seqs=1, reconnect_timeout_s=0.1, step_patience_s=300.0)
    executor, ids = FakeExecutor(fault=watch), ("r0", "r1", "r2", "r3")
    async with (
        scheduler_in_process(executor, config=config, watchers=[recorder]) as scheduler,
        AsyncClient(scheduler.address) as client,
    ):
        watch.hold(after=2)
        all_are_here, num_here = asyncio.Event(), itertools.count(1)

        def listener(_life: Life, event: LifeEvent) -> None:
            if event.kind is LifeKind.RECEIVED and next(num_here) == len(ids):
                all_are_here.set()

        recorder.listen(listener)
        params = SamplingParams(seed=1, max_tokens=30)
        running = [
            asyncio.create_task(client.complete([n, 1, 2], params, request_id=request_id))
            for n, request_id in enumerate(ids)
        ]
        async with asyncio.timeout(PATIENCE_S):
            await all_are_here.wait()
        where = f"--address={scheduler.address}"
        code, text = await explain("--next", where)
        assert code == 0
        assert f"  {executor.address}: " in text
        queued = scheduler.cluster.name_of(scheduler.cluster.scheduler.heads()[0][0])
        _, text = await explain(queued, where)
        assert "what keeps it now:" in text
        with pytest.raises(RequestIdInUse):
            await client.complete([1], params, request_id="r0")
        watch.release()
        await asyncio.gather(*running)
        code, text = await explain("--next", where)
        assert (code, text) == (0, "nobody waits for an executor\n")


async def test_explain_says_that_nothing_is_written_down_when_a_scheduler_has_no_recorder() -> None:
    async with scheduler_in_process() as scheduler:
        code, text = await explain("r1", f"--address={scheduler.address}")
    assert (code, "--remember-requests" in text) == (1, True)


async def test_explain_tells_the_same_of_a_journal_when_no_scheduler_runs() -> None:
    lives = lives_of(Path(REPLAYED), 1000).ended
    kinds = {life.request_id: {event.kind for event in life.events} for life in lives}
    preempted = next(name for name, found in kinds.items() if LifeKind.PREEMPTED in found)
    code, text = await explain(preempted, f"--journal={REPLAYED}")
    assert (code, text.startswith(f"request {preempted}")) == (0, True)
    assert "preempted" in text
    assert (await explain(preempted, f"--journal={REPLAYED}")) == (code, text)
    assert "what happened before is not in it" in text
    code, text = await explain("nobody", f"--journal={REPLAYED}")
    assert (code, "none of those that were refused" in text) == (1, True)


@pytest.mark.parametrize(
    "options", [[], ["r1", "--next"], ["--next", "--journal=x"], ["r1", "--journal=README.md"]]
)
def test_explain_says_what_it_takes_when_it_is_asked_for_something_else(options: list[str]) -> None:
    done = run_process("splitserve_cli", "explain", *options)
    assert done.returncode in (1, 2)
    assert "splitserve explain: " in done.stderr
    assert "Traceback" not in done.stderr
