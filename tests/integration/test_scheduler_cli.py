"""Tests `splitserve scheduler` and `splitserve info` as a user runs them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from scheduler_service.config import SchedulerServiceConfig
from scheduler_service.scheduler.values import BatchPolicyName, PreemptionMode
from splitserve_client import Executor, SamplingParams
from splitserve_options import options
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.processes.addresses import reserve_address
from tests.support.processes.fake_service import FakeService, StepWatch, fake_service
from tests.support.processes.forked import run_process
from tests.support.processes.patience import PATIENCE_S

LONG = SamplingParams(seed=1, max_tokens=60)


@pytest.mark.parametrize(
    ("flag", "value", "allowed"),
    [
        ("queue-policy", "lifo", "one of fcfs, priority, fair, deadline"),
        ("tenant-weights", "b=2,a=nan", "NAME=WEIGHT with a weight above 0"),
        ("delay-factor", "-1", "a number from 0 to 1000"),
    ],
)
def test_scheduler_exits_with_2_when_an_option_is_wrong(
    flag: str, value: str, allowed: str
) -> None:
    done = run_process("scheduler_service", f"--{flag}={value}")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"splitserve scheduler: --{flag}")
    assert value.rpartition(",")[2] in done.stderr
    assert allowed in done.stderr


@pytest.mark.parametrize(
    ("flag", "path", "why"),
    [
        ("--journal", "/no/such/folder/journal", "No such file or directory"),
        ("--journal", "/dev", "not a regular file"),
        ("--audit-log", "/no/such/folder/audit", "No such file or directory"),
        ("--audit-log", "/dev", "Is a directory"),
    ],
)
def test_scheduler_exits_with_2_when_a_file_is_unwritable(flag: str, path: str, why: str) -> None:
    addresses = ("--listen=127.0.0.1:0", "--cluster-listen=127.0.0.1:0")
    done = run_process("scheduler_service", *addresses, f"{flag}={path}")
    assert done.returncode == 2
    assert done.stderr == f"splitserve scheduler: {flag} {path}: {why}\n"


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--api-keys=/nowhere"], "--api-keys /nowhere: No such file or directory"),
        (["--api-keys={folder}"], "--api-keys {folder}: Is a directory"),
        (["--api-keys={bad}"], "--api-keys {bad}: is not valid JSON: "),
        (["--api-keys={good}", "--tenants={bad}"], "--tenants {bad}: not valid TOML: "),
        (["--tenants={good}"], "--tenants is given without --api-keys and --jwt-issuer"),
        (["--jwt-issuer=https://a.example"], "--jwt-issuer is given without --jwt-audience"),
    ],
)
def test_scheduler_exits_with_2_when_callers_are_unusable(
    flags: list[str], problem: str, tmp_path: Path
) -> None:
    names = {name: tmp_path / name for name in ("folder", "bad", "good")}
    names["folder"].mkdir()
    names["bad"].write_text("{")
    names["good"].write_text('{"version": 1, "keys": []}')
    done = run_process("scheduler_service", *(flag.format_map(names) for flag in flags))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"splitserve scheduler: {problem.format_map(names)}")


def test_scheduler_names_the_variable_of_a_bad_value() -> None:
    kept = {name: text for name, text in os.environ.items() if not name.startswith("SPLITSERVE_")}
    path = os.pathsep.join(filter(None, sys.path))
    # As users start it: the command becomes the scheduler.
    done = subprocess.run(
        [sys.executable, "-m", "splitserve_cli", "scheduler"],
        env=kept | {"PYTHONPATH": path, "SPLITSERVE_QUEUE_POLICY": "lifo"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("splitserve scheduler: SPLITSERVE_QUEUE_POLICY (environment)")


def test_policies_reach_the_configuration_when_they_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "splitserve.toml"
    file.write_text('queue-policy = "fair"\ntenant-weights = "a=3, team b=0.5"\nmax-loras = 2\n')
    argv = ["--config", str(file), "--batch-policy=prefill-first", "--no-prefix-caching"]
    environ = {"SPLITSERVE_PREEMPTION_MODE": "swap", "SPLITSERVE_MAX_LORAS": "3"}
    config = SchedulerServiceConfig.from_options(options.parse("scheduler", argv, environ))
    policies = config.cluster.policies
    assert (policies.queue_policy, policies.tenant_weights) == ("fair", {"a": 3.0, "team b": 0.5})
    assert policies.batch_policy is BatchPolicyName.PREFILL_FIRST
    assert policies.preemption_mode is PreemptionMode.SWAP
    assert (policies.prefix_caching, policies.host_prefix_cache) == (False, True)
    assert config.cluster.max_adapters == 3


# -- splitserve info -------------------------------------------------------------------------------


async def info(service: FakeService) -> tuple[dict[str, int], str]:
    """The one executor as `splitserve info` has it: as an object, and as a line."""
    address = f"--address={service.scheduler.address}"
    as_json = await asyncio.to_thread(run_process, "splitserve_cli", "info", "--json", address)
    as_table = await asyncio.to_thread(run_process, "splitserve_cli", "info", address)
    assert (as_json.returncode, as_table.returncode) == (0, 0), as_json.stderr + as_table.stderr
    (executor,) = json.loads(as_json.stdout)["executors"]
    return executor, as_table.stdout.splitlines()[-1]


async def held(
    service: FakeService, watch: StepWatch, is_so: Callable[[Executor], bool]
) -> Executor:
    """Lets steps go on one by one until `is_so` while the next one is held."""
    for _ in range(500):
        watch.hold(after=0)
        await watch.wait_held()
        executor = (await service.client.list_executors()).executors[0]
        if is_so(executor):
            return executor
    raise AssertionError("it never was so")


async def test_info_counts_requests_and_blocks() -> None:
    watch = StepWatch()
    executor = FakeExecutor(num_host_blocks=8, fault=watch)
    async with fake_service(executor, pipeline_depth=1, max_num_seqs=3) as service:
        watch.hold(after=10)
        params = replace(LONG, n=3)
        running = asyncio.create_task(service.client.complete(list(range(16)), params))
        await watch.wait_held()
        waiting = asyncio.create_task(service.client.complete([1], LONG))
        await service.wait_until_queued(1)
        state, line = await info(service)
        assert (state["num_running_requests"], state["num_waiting_requests"]) == (1, 1)
        assert (state["num_swapped_requests"], state["num_free_host_blocks"]) == (0, 8)
        # Of the prompt, three blocks are shared: a sibling computes the last token itself.
        used = 64 - state["num_free_device_blocks"]
        assert 4 + 3 <= used <= 3 + 3 * 4
        assert state["num_cached_device_blocks"] >= 4
        assert f"{64 - used} of 64" in line
        assert "8 of 8" in line
        watch.release()
        await asyncio.gather(running, waiting)
        await service.wait_idle()
        state, _ = await info(service)
        assert state["num_cached_device_blocks"] > 0


async def test_info_shows_swapped_requests_when_the_device_is_too_small() -> None:
    watch = StepWatch()
    executor = FakeExecutor(num_device_blocks=24, num_host_blocks=40, fault=watch)
    async with fake_service(executor, preemption_mode="swap") as service:
        watch.hold()
        running = [
            asyncio.create_task(service.client.complete([number], LONG)) for number in range(3)
        ]
        await held(service, watch, lambda state: state.num_swapped_requests == 1)
        state, line = await info(service)
        assert state["num_running_requests"] + state["num_waiting_requests"] == 2
        assert 0 < state["num_free_host_blocks"] < 40
        assert f"{state['num_free_host_blocks']} of 40" in line
        watch.release()
        await asyncio.gather(*running)
        await service.wait_idle()


@pytest.mark.parametrize(
    ("flags", "is_said"),
    [
        ([], False),
        (["--api-keys={keys}"], True),
        (["--api-keys={keys}", "--cluster-token-file={token}"], False),
    ],
)
def test_scheduler_warns_when_executors_are_not_known(
    flags: list[str], is_said: bool, tmp_path: Path
) -> None:
    names = {name: tmp_path / name for name in ("keys", "token")}
    names["keys"].write_text('{"version": 1, "keys": []}')
    names["token"].write_text("a secret of the cluster")
    addresses = [f"--{name}={reserve_address()}" for name in ("listen", "cluster-listen")]
    given = [flag.format_map(names) for flag in flags]
    # Told to stop at once, by its standard input.
    done = run_process("scheduler_service", "--exit-on-stdin-eof", *addresses, *given)
    assert done.returncode == 0, done.stderr
    assert ("executors_unauthenticated" in done.stderr) == is_said
