"""Tests the commands `splitserve doctor`, `explain` and `info` against real servers."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest

from scheduler_service.callers import Scope
from scheduler_service.config import ClusterConfig
from scheduler_service.watching import Life, LifeEvent, LifeKind, LifeRecorder
from scheduler_service.watching.explain_journal import lives_of
from splitserve_client import AsyncClient, RequestIdInUse, SamplingParams
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.processes.fake_service import StepWatch
from tests.support.processes.forked import run_process
from tests.support.processes.gateway import running_gateway, text_executor
from tests.support.processes.patience import PATIENCE_S
from tests.support.processes.scheduler_in_process import scheduler_in_process
from tests.support.security.credentials import KeyRing


async def doctor(*options: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit code, and what it finds, by name; of the machine as little as can be wrong."""
    command = ("doctor", "--json", "--for=gateway", *options)
    done = await asyncio.to_thread(run_process, "splitserve_cli", *command)
    assert done.stderr == ""
    return done.returncode, {each["name"]: each for each in json.loads(done.stdout)["findings"]}


async def test_doctor_finds_nothing_wrong_with_a_scheduler() -> None:
    executor = FakeExecutor()
    async with scheduler_in_process(executor) as scheduler:
        code, found = await doctor(f"--address={scheduler.address}")
        address = executor.address
    wrong = [each for each in found.values() if each["state"] == "wrong"]
    assert (code, wrong) == (0, [])
    assert found["clock of the scheduler"]["found"].startswith("agrees with this machine")
    assert found[f"contract of executor {address}"]["state"] == "ok"


async def test_doctor_reports_servers_that_do_not_answer() -> None:
    async with scheduler_in_process() as scheduler:
        address = scheduler.address
    code, found = await doctor(f"--address={address}", f"--gateway=http://{address}")
    assert code == 1
    assert found[f"connection to {address}"]["state"] == "wrong"


async def test_doctor_asks_a_living_scheduler_of_several(tmp_path: Path) -> None:
    listed = tmp_path / "schedulers"
    async with scheduler_in_process(FakeExecutor()) as scheduler:
        async with scheduler_in_process() as gone:
            pass
        listed.write_text(f"{gone.address}\n{scheduler.address}\n")
        code, found = await doctor(f"--address=file:{listed}")
        _, alike = await doctor(f"--address={gone.address},{scheduler.address}")
    assert code == 1
    assert found[f"connection to {gone.address}"]["state"] == "wrong"
    assert found[f"connection to {scheduler.address}"]["state"] == "ok"
    assert found["clock of the scheduler"]["state"] == "ok"
    assert found.keys() == alike.keys()


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("localhost", "'localhost' is invalid; allowed: host:port"),
        ("localhost:70000", "'localhost:70000' is invalid; allowed: host:port"),
        ("file:/nowhere", "file:/nowhere: No such file or directory"),
    ],
)
async def test_doctor_refuses_what_is_no_address(address: str, found: str) -> None:
    code, findings = await doctor(f"--address={address}")
    assert code == 1
    assert findings["address"]["found"].startswith(found)


async def test_doctor_names_the_remedy_when_the_key_is_wrong(tmp_path: Path) -> None:
    keys = KeyRing()
    operator, other = keys.add("operators", Scope.OPERATOR), keys.add("users", Scope.GENERATE)
    given = {"operator": operator, "other": other, "wrong": "sk-nobody"}
    async with scheduler_in_process(FakeExecutor(), callers=keys) as scheduler:
        where = f"--address={scheduler.address}"
        results = {
            name: await doctor(where, key_file(tmp_path, key)) for name, key in given.items()
        }
    codes = {name: code for name, (code, _) in results.items()}
    assert codes == {"operator": 0, "other": 1, "wrong": 1}
    assert "scope operator" in results["other"][1]["executors"]["remedy"]
    assert "--api-key-file" in results["wrong"][1]["model"]["remedy"]


async def test_doctor_reports_missing_executors_and_gateways() -> None:
    async with scheduler_in_process() as scheduler:
        options = (f"--address={scheduler.address}", f"--gateway=http://{scheduler.address}")
        code, found = await doctor(*options)
    assert code == 1
    assert found["model"]["found"] == "none"
    assert found["executors"]["state"] == "wrong"
    assert found[f"gateway {scheduler.address}"]["state"] == "wrong"


async def test_doctor_checks_files_when_no_server_is_given(tmp_path: Path) -> None:
    code, found = await doctor(f"--tls-cert={tmp_path}/no.crt", f"--tls-key={tmp_path}/no.key")
    assert code == 1
    assert found[f"file {tmp_path}/no.crt"]["found"] == "No such file or directory"
    file = tmp_path / "gateway.toml"
    file.write_text("http = 'nowhere'\n")
    code, found = await doctor(f"--config={file}")
    assert (code, found["options of gateway"]["state"]) == (1, "wrong")


REPLAYED = Path(__file__).parents[1] / "replay" / "everything.journal"


async def explain(*options: str) -> tuple[int, str]:
    """The exit code, and what it prints."""
    done = await asyncio.to_thread(run_process, "splitserve_cli", "explain", *options)
    assert done.stderr == ""
    return done.returncode, done.stdout


async def test_explain_tells_the_life_of_a_request_by_its_id() -> None:
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
        assert kinds == ["received", "assigned", "began", "first_token", "ended"]
        assert abs(life["began_at_s"] - time.time()) < 3600
        code, text = await explain("minx", where)
        assert (code, "unknown request: minx" in text, "1 ended" in text) == (1, True, True)


async def test_explain_next_names_what_the_first_waits_for() -> None:
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
        assert "what blocks it now:" in text
        with pytest.raises(RequestIdInUse):
            await client.complete([1], params, request_id="r0")
        watch.release()
        await asyncio.gather(*running)
        code, text = await explain("--next", where)
        assert (code, text) == (0, "no request waits for an executor\n")


async def test_explain_names_the_option_when_nothing_is_recorded() -> None:
    async with scheduler_in_process() as scheduler:
        code, text = await explain("r1", f"--address={scheduler.address}")
    assert (code, "--remember-requests" in text) == (1, True)


async def test_explain_reads_a_journal() -> None:
    lives = lives_of(Path(REPLAYED), 1000).ended
    kinds = {life.request_id: {event.kind for event in life.events} for life in lives}
    preempted = next(name for name, found in kinds.items() if LifeKind.PREEMPTED in found)
    code, text = await explain(preempted, f"--journal={REPLAYED}")
    assert (code, text.startswith(f"request {preempted}")) == (0, True)
    assert "preempted" in text
    assert "before the file begins" in text
    code, text = await explain("nobody", f"--journal={REPLAYED}")
    assert (code, "lacks those that were refused" in text) == (1, True)


@pytest.mark.parametrize(
    "options", [[], ["r1", "--next"], ["--next", "--journal=x"], ["r1", "--journal=README.md"]]
)
def test_explain_refuses_bad_arguments(options: list[str]) -> None:
    done = run_process("splitserve_cli", "explain", *options)
    assert done.returncode in (1, 2)
    assert "splitserve explain: " in done.stderr
    assert "Traceback" not in done.stderr


async def test_explain_finds_requests_by_ids_of_the_gateway(
    tmp_path: Path,
) -> None:
    async with (
        running_gateway(text_executor(tmp_path)) as gateway,
        AsyncClient(gateway.service.scheduler.address) as operators,
    ):
        body = {"messages": [{"role": "user", "content": "a"}], "seed": 1, "max_tokens": 3}
        chat = await gateway.http.post("/v1/chat/completions", json=body)
        batch = {"prompt": ["a", "b"], "seed": 1, "max_tokens": 2, "request_id": "job.7"}
        completions = await gateway.http.post("/v1/completions", json=batch)
        ids = [chat.json()["id"], chat.headers["x-request-id"]]
        (by_answer,), (by_exchange,) = [
            (await operators.explain(request_id)).lives for request_id in ids
        ]
        of_batch = [
            {life.request_id for life in (await operators.explain(request_id)).lives}
            for request_id in (completions.json()["id"], completions.headers["x-request-id"])
        ]

    assert by_answer.request_id == by_exchange.request_id
    assert by_answer.events[-1].numbers["num_output_tokens"] == 3
    assert completions.json()["id"] == "cmpl-job.7"
    assert of_batch[0] == of_batch[1]
    assert len(of_batch[0]) == 2


async def test_doctor_finds_nothing_wrong_with_a_gateway(tmp_path: Path) -> None:
    async with running_gateway(text_executor(tmp_path)) as gateway:
        options = (f"--address={gateway.service.scheduler.address}", f"--gateway={gateway.url}")
        code, findings = await doctor(*options)
        secured = await asyncio.to_thread(
            run_process,
            *("splitserve_cli", "doctor", f"--gateway={gateway.url.replace('http', 'https')}"),
        )

    assert [each for each in findings.values() if each["state"] == "wrong"] == []
    assert code == 0
    assert "clock of the gateway" in findings
    assert any(name.startswith("models of ") for name in findings)
    assert (secured.returncode, "the server uses plain text" in secured.stdout) == (1, True)


async def info(*options: str) -> str:
    done = await asyncio.to_thread(run_process, "splitserve_cli", "info", *options)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def key_file(folder: Path, key: str) -> str:
    """Writes the key to a file; returns the option that names it."""
    path = folder / "operator.key"
    path.write_text(key)
    path.chmod(0o600)
    return f"--api-key-file={path}"


async def test_info_shows_all_to_a_key_of_an_operator(tmp_path: Path) -> None:
    keys = KeyRing()
    key = keys.add("operators", Scope.OPERATOR)
    async with scheduler_in_process(FakeExecutor(), callers=keys) as scheduler:
        shown = await info(f"--address={scheduler.address}", key_file(tmp_path, key))
    assert shown.startswith("model: fake (")
    assert "connected" in shown
