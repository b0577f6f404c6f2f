"""`splitserve doctor` where something is wrong for real."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from scheduler_service.callers.caller import Scope
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.processes.forked import run_process
from tests.support.processes.scheduler_in_process import scheduler_in_process
from tests.support.security.key_ring import KeyRing


async def doctor(*options: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit code, and what it finds, by name; of the machine as little as can be wrong."""
    command = ("doctor", "--json", "--for=gateway", *options)
    done = await asyncio.to_thread(run_process, "splitserve_cli", *command)
    assert done.stderr == ""
    return done.returncode, {each["name"]: each for each in json.loads(done.stdout)["findings"]}


async def test_doctor_finds_nothing_wrong_with_a_scheduler_that_is_well() -> None:
    executor = FakeExecutor()
    async with scheduler_in_process(executor) as scheduler:
        code, found = await doctor(f"--address={scheduler.address}")
        address = executor.address
    wrong = [each for each in found.values() if each["state"] == "wrong"]
    assert (code, wrong) == (0, [])
    assert found["clock of the scheduler"]["found"].startswith("agrees with ours")
    assert found[f"contract of executor {address}"]["state"] == "ok"


async def test_doctor_says_what_is_wrong_when_no_scheduler_and_no_gateway_is_there() -> None:
    async with scheduler_in_process() as scheduler:
        address = scheduler.address
    code, found = await doctor(f"--address={address}", f"--gateway=http://{address}")
    assert code == 1
    assert found[f"connection to {address}"]["state"] == "wrong"


async def test_doctor_asks_whoever_is_there_of_several_schedulers(tmp_path: Path) -> None:
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
        ("localhost", "'localhost' is not allowed; it takes host:port"),
        ("localhost:70000", "'localhost:70000' is not allowed; it takes host:port"),
        ("file:/nowhere", "file:/nowhere: No such file or directory"),
    ],
)
async def test_doctor_says_what_is_allowed_when_an_address_is_none(
    address: str, found: str
) -> None:
    code, findings = await doctor(f"--address={address}")
    assert code == 1
    assert findings["address"]["found"].startswith(found)


async def test_doctor_says_what_to_give_when_the_key_is_none_or_another(tmp_path: Path) -> None:
    keys = KeyRing()
    operator, other = keys.add("operators", Scope.OPERATOR), keys.add("users", Scope.GENERATE)
    files = {}
    for name, key in (("operator", operator), ("other", other), ("wrong", "sk-nobody")):
        files[name] = tmp_path / name
        files[name].write_text(key)
        files[name].chmod(0o600)
    async with scheduler_in_process(FakeExecutor(), callers=keys) as scheduler:
        where = f"--address={scheduler.address}"
        results = {
            name: await doctor(where, f"--api-key-file={file}") for name, file in files.items()
        }
    codes = {name: code for name, (code, _) in results.items()}
    assert codes == {"operator": 0, "other": 1, "wrong": 1}
    assert "scope operator" in results["other"][1]["executors"]["remedy"]
    assert "--api-key-file" in results["wrong"][1]["model"]["remedy"]


async def test_doctor_says_that_a_scheduler_has_no_executor_and_a_server_is_no_gateway() -> None:
    async with scheduler_in_process() as scheduler:
        options = (f"--address={scheduler.address}", f"--gateway=http://{scheduler.address}")
        code, found = await doctor(*options)
    assert code == 1
    assert found["model"]["found"] == "none"
    assert found["executors"]["state"] == "wrong"
    assert found[f"gateway {scheduler.address}"]["state"] == "wrong"


async def test_doctor_looks_at_files_that_are_given_when_no_server_is(tmp_path: Path) -> None:
    code, found = await doctor(f"--tls-cert={tmp_path}/no.crt", f"--tls-key={tmp_path}/no.key")
    assert code == 1
    assert found[f"file {tmp_path}/no.crt"]["found"] == "No such file or directory"
    file = tmp_path / "gateway.toml"
    file.write_text("http = 'nowhere'\n")
    code, found = await doctor(f"--config={file}")
    assert (code, found["options of gateway"]["state"]) == (1, "wrong")
