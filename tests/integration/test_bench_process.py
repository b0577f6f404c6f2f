"""`splitserve bench` as a process: where everything has TLS and asks for keys, and Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.processes.fake_service import StepWatch, fake_service
from tests.support.processes.forked import run_process
from tests.support.processes.interrupts import children_take_sigint
from tests.support.processes.patience import PATIENCE_S
from tests.support.security.secured_stack import SecuredStack, secured_stack


async def bench(stack: SecuredStack, *arguments: str) -> subprocess.CompletedProcess[str]:
    ca = stack.certificates.directory / "ca.crt"
    given = (f"--tls-ca={ca}", "--rate=50", "--requests=3", "--output-tokens=3", "--quiet")
    return await asyncio.to_thread(
        run_process, "splitserve_bench", *arguments, *given, "--prompt-tokens=20"
    )


async def test_load_is_put_on_secured_servers_with_the_key_of_each(tmp_path: Path) -> None:
    async with secured_stack(tmp_path) as stack:
        keys = {}
        for tenant in ("tenant a", "tenant b"):
            keys[tenant] = tmp_path / tenant
            keys[tenant].write_text(f"{stack.keys[tenant]}\n")
            keys[tenant].chmod(0o600)
        report = tmp_path / "report.json"

        done = await bench(
            stack,
            f"a=grpc://{stack.clients}",
            f"b=https://{stack.http}/v1",
            *(f"--api-key-file=a={keys['tenant a']}", f"--api-key-file=b={keys['tenant b']}"),
            f"--json={report}",
        )
        refused = await bench(stack, f"https://{stack.http}/v1")

    assert (done.returncode, done.stderr) == (0, "")
    content = json.loads(report.read_text())
    assert [each["requests"]["num_completed"] for each in content["targets"]] == [3, 3]
    said = done.stdout + report.read_text()
    assert not any(key in said for key in stack.keys.values())
    assert refused.returncode == 1
    assert refused.stderr.endswith("[http_401]\n")


async def test_command_reports_what_it_has_when_it_is_interrupted() -> None:
    watch = StepWatch()
    async with fake_service(FakeExecutor(fault=watch)) as service:
        watch.hold(after=40)
        with children_take_sigint():
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "splitserve_bench", service.scheduler.address),
                *("--concurrency=1", "--requests=100", "--prompt-tokens=4", "--quiet"),
                *("--output-tokens=4", "--token-range=1:20"),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            )
        await watch.wait_held()
        process.send_signal(signal.SIGINT)
        said, problems = await asyncio.wait_for(process.communicate(), PATIENCE_S)
        watch.release()

    assert (process.returncode, problems) == (130, b"")
    # Of 40 steps at most: each request takes four, and a probe came first.
    num_completed = int(said.decode().split("requests    ")[1].split()[0])
    assert 1 <= num_completed <= 10
    assert b"0 failed" in said
