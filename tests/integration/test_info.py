"""`splitserve info` for operators, with nothing but what makes them operators."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from scheduler_service.callers.caller import Scope
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.processes.forked import run_process
from tests.support.processes.scheduler_in_process import scheduler_in_process
from tests.support.security.key_ring import KeyRing
from tests.support.security.secured_stack import SecuredStack, secured_stack


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[SecuredStack]:
    async with secured_stack(tmp_path) as running:
        yield running


async def info(*options: str) -> str:
    """What it prints."""
    done = await asyncio.to_thread(run_process, "splitserve_cli", "info", *options)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def operators(stack: SecuredStack) -> list[str]:
    """Who has called, as the audit log has it."""
    events = [json.loads(line) for line in (stack.folder / "audit").read_text().splitlines()]
    return [event["caller"] for event in events if event["event"] == "operator_called"]


def key_file(folder: Path, key: str) -> str:
    path = folder / "operator.key"
    path.write_text(key)
    path.chmod(0o600)
    return f"--api-key-file={path}"


async def test_info_shows_all_to_a_key_of_the_scope_operator_alone(tmp_path: Path) -> None:
    keys = KeyRing()
    key = keys.add("operators", Scope.OPERATOR)
    async with scheduler_in_process(FakeExecutor(), callers=keys) as scheduler:
        shown = await info(f"--address={scheduler.address}", key_file(tmp_path, key))
    assert shown.startswith("model: fake (")
    assert "connected" in shown


async def test_info_shows_executors_to_an_operators_certificate_alone_and_the_model_to_its_key(
    stack: SecuredStack, tmp_path: Path
) -> None:
    where = (f"--address={stack.clients}", f"--cluster-address={stack.cluster}")
    flags = (*where, *stack.certificates.flags("operator"))

    with_certificate = await info(*flags)
    assert with_certificate.startswith("model: not shown")
    assert stack.executor in with_certificate
    assert operators(stack)[-1] == "certificate:operator"

    with_key = await info(*flags, key_file(tmp_path, stack.keys["operator"]))
    assert with_key.startswith("model: ")
    assert "not shown" not in with_key
    assert stack.executor in with_key
    assert re.fullmatch(r"key:\w+, certificate:operator", operators(stack)[-1])
