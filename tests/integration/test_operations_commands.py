"""Runs every command that docs/operations.md shows, with names and ports of this machine.

Those of containers are what `make compose-test` does.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from splitserve_client import AsyncClient, SplitserveError
from tests.contract.stranger.process import poll
from tests.support.models import tiny_tokenizers
from tests.support.processes import light_executor
from tests.support.processes.addresses import reserve_address
from tests.support.processes.forked import ROOT, ForkedProcess, run_process, start_process
from tests.support.processes.patience import PATIENCE_S, PATIENT_AT_CALLS

OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
SCHEDULER = "splitserve scheduler --listen 0.0.0.0:50051 --cluster-listen 0.0.0.0:50050"
JOURNAL = "splitserve scheduler --journal FILE"
EXECUTOR = "splitserve executor --scheduler a:50050,b:50050"
NEW_EXECUTOR = "splitserve executor --scheduler SCHEDULER:50050 --listen 0.0.0.0:50053"
GATEWAY = "splitserve gateway --schedulers a:50051,b:50051"
ANY_GATEWAY = "splitserve gateway --schedulers HOST:PORT,..."
GENERATE = "splitserve generate --address a:50051,b:50051"
DRAIN = "splitserve drain HOST:PORT [--timeout-s 30]"
UNDRAIN = "splitserve drain --undo HOST:PORT"
HEALTH = "python -m splitserve_rpc.healthcheck HOST:PORT"
GATEWAY_HEALTH = "python -m splitserve_gateway.healthcheck"
INFO, INFO_JSON = "splitserve info", "splitserve info --json"
KEYS = "splitserve keys list FILE"
REPLAY = "splitserve replay FILE"
EXPLAIN, EXPLAIN_NEXT = "splitserve explain REQUEST", "splitserve explain --next"
EXPLAIN_JOURNAL = "splitserve explain REQUEST --journal FILE"
DOCTOR, DOCTOR_OF_PROCESS = "splitserve doctor", "splitserve doctor --for scheduler --config FILE"
DOCTOR_OF_ALL = "splitserve doctor --address a:50051 --gateway http://a:8000"
RUN_HERE = {
    *(DOCTOR, DOCTOR_OF_PROCESS, DOCTOR_OF_ALL),
    *(SCHEDULER, JOURNAL, EXECUTOR, NEW_EXECUTOR, GATEWAY, ANY_GATEWAY, GENERATE, DRAIN, UNDRAIN),
    *(
        HEALTH,
        GATEWAY_HEALTH,
        INFO,
        INFO_JSON,
        KEYS,
        REPLAY,
        EXPLAIN,
        EXPLAIN_NEXT,
        EXPLAIN_JOURNAL,
    ),
}
# Spoken of by their names, or run elsewhere: test_certs, tests/integration/test_benchmarks.
NAMED = {
    *("splitserve certs", "splitserve drain", "splitserve explain", "splitserve serve"),
    "splitserve top",
    *("python -m benchmarks.ceiling", "python -m benchmarks.step_cost"),
    "python -m benchmarks.grpc_messages",
}


def shown_commands() -> set[str]:
    fence = re.compile(r"^```\n(.*?)^```", re.MULTILINE | re.DOTALL)
    lines = [line for block in fence.findall(OPERATIONS) for line in block.splitlines()]
    texts = [*lines, *re.findall(r"`([^`\n]+)`", fence.sub("", OPERATIONS))]
    commands = (re.split(r"\s+(?:#|&\s|\.\.\.)", text)[0].strip() for text in texts)
    return {each for each in commands if re.match(r"(splitserve [a-z]|python -m )", each)}


@dataclass(slots=True)
class Machines:
    """What the document's names are here. Hosts a and b have ports of their own on this one."""

    folder: Path
    ports: dict[str, str] = field(default_factory=dict)
    running: list[ForkedProcess] = field(default_factory=list)

    def at(self, text: str) -> str:
        """The address here of what the document calls `text`."""
        if text not in self.ports:
            self.ports[text] = reserve_address()
        return self.ports[text]

    def here(self, command: str, **names: str) -> list[str]:
        """Its words, without the program; `names`: what words in capitals stand for."""
        for name, meant in names.items():
            command = re.sub(rf"\b{name}\b(:PORT|:\d+)?(,\.\.\.)?", meant, command)
        command = re.sub(r"\b[ab]:\d+", lambda found: self.at(found[0]), command)
        return shlex.split(re.sub(r"\[.*\]", "", command))[1:]

    def start(self, module: str, *words: str) -> ForkedProcess:
        """A process that serves until the test ends it."""
        process = start_process(
            module,
            [*words, "--exit-on-stdin-eof", "--log-level=error"],
            stdin=subprocess.PIPE,
            environment={light_executor.TOKENIZER: str(self.folder)},
        )
        self.running.append(process)
        return process

    def scheduler(self, host: str, *options: str) -> None:
        """What the document starts on `host`, and what it shows of journals."""
        _, *words = self.here(SCHEDULER)
        ports = {"0.0.0.0:50051": f"{host}:50051", "0.0.0.0:50050": f"{host}:50050"}
        words = [self.at(ports[word]) if word in ports else word for word in words]
        self.start("scheduler_service", *words, *options)

    def executor(self, command: str) -> tuple[ForkedProcess, str]:
        _, *words = self.here(command, SCHEDULER=self.at("a:50050"))
        address = reserve_address()
        words = [address if word.startswith("0.0.0.0") else word for word in words]
        if address not in words:
            words += ["--listen", address]
        return self.start(light_executor.MODULE, *words, "--num-device-blocks", "64"), address

    async def wait_connected(self, executor: str) -> None:
        """Until the scheduler of one of the hosts has it."""

        async def ask() -> tuple[bool, object]:
            try:
                listed = [await client.list_executors() for client in clients]
            except SplitserveError as error:
                return False, error
            found = [each for one in listed for each in one.executors]
            return any(e.address == executor and e.is_connected for e in found), found

        async with (
            AsyncClient(self.at("a:50050"), PATIENT_AT_CALLS) as a,
            AsyncClient(self.at("b:50050"), PATIENT_AT_CALLS) as b,
        ):
            clients = a, b
            await poll(ask, PATIENCE_S)

    async def run(self, command: str, *options: str, **names: str) -> str:
        words = self.here(command, **names)
        operators = {
            "SPLITSERVE_ADDRESS": self.at("a:50051"),
            "SPLITSERVE_CLUSTER_ADDRESS": self.at("a:50050"),
        }
        if words[0] == "-m":
            done = await asyncio.to_thread(run_module, *words, *options)
        else:
            done = await asyncio.to_thread(
                run_process, "splitserve_cli", *words, *options, **operators
            )
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout


def run_module(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    with ExitStack() as stack:
        (tmp_path / "tokenizer.json").write_text(tiny_tokenizers.byte_level().to_str())
        found = Machines(tmp_path)
        yield found
        for process in found.running:
            stack.callback(process.communicate)
            stack.callback(process.kill)


def test_every_command_is_run() -> None:
    assert shown_commands() == RUN_HERE | NAMED


async def test_commands_do_what_the_document_says(machines: Machines) -> None:
    journal, keys = str(machines.folder / "journal"), str(machines.folder / "keys.json")
    _, *recording = machines.here(JOURNAL, FILE=journal)
    machines.scheduler("a", *recording)
    machines.scheduler("b")
    old, address = machines.executor(EXECUTOR)
    await machines.wait_connected(address)
    http = reserve_address()
    _, *words = machines.here(GATEWAY)
    machines.start("splitserve_gateway", *words, "--http", http)
    _, *words = machines.here(ANY_GATEWAY, HOST=machines.at("a:50051"))
    machines.start("splitserve_gateway", *words, "--http", reserve_address())

    said = await machines.run(GENERATE, "--max-tokens", "4", "Once")
    assert said
    _, new = machines.executor(NEW_EXECUTOR)
    await machines.wait_connected(new)
    assert new in await machines.run(INFO)
    listed = json.loads(await machines.run(INFO_JSON))
    assert new in {executor["address"] for executor in listed["executors"]}
    await machines.run(
        "splitserve generate --address a:50051", "--request-id=tale", "--max-tokens=4", "Once"
    )
    assert "tale" in await machines.run(EXPLAIN, REQUEST="tale")
    assert await machines.run(EXPLAIN_NEXT)
    await machines.run(HEALTH, HOST=machines.at("a:50051"))
    await wait_alive(http)
    await machines.run(GATEWAY_HEALTH, "--http", http)
    options = machines.folder / "scheduler.toml"
    options.write_text("max-num-seqs = 8\n")
    machines.ports["a:8000"] = http
    for doctor in (DOCTOR, DOCTOR_OF_PROCESS, DOCTOR_OF_ALL):
        assert "0 wrong" in await machines.run(doctor, FILE=str(options))

    assert await machines.run(DRAIN, HOST=new)
    await machines.run(UNDRAIN, HOST=new)
    await machines.wait_connected(new)
    old.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(old.wait, PATIENCE_S) == 0

    await machines.run("splitserve keys add FILE --tenant alice", FILE=keys)
    assert "alice" in await machines.run(KEYS, FILE=keys)
    scheduler = machines.running[0]
    scheduler.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(scheduler.wait, PATIENCE_S) == 0
    await machines.run(REPLAY, FILE=journal)
    assert "tale" in await machines.run(EXPLAIN_JOURNAL, REQUEST="tale", FILE=journal)


async def wait_alive(http: str) -> None:
    async def ask() -> tuple[bool, object]:
        try:
            _, writer = await asyncio.open_connection(*http.split(":"))
        except OSError as error:
            return False, error
        writer.close()
        return True, None

    await poll(ask, PATIENCE_S)
