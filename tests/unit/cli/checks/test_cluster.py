"""Checks of schedulers, executors, models and clocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import tokenizers

from splitserve_cli.checks.cluster import (
    check_clock,
    check_executors,
    check_model,
    check_tool_calls,
)
from splitserve_cli.checks.finding import Finding, State
from splitserve_client import (
    CallerNotAllowed,
    CallerUnknown,
    Executor,
    ExecutorList,
    Model,
    ModelNotReady,
    Readiness,
    ServerUnreachable,
)
from splitserve_contract import CONTRACT_MAJOR, CONTRACT_MINOR
from splitserve_text import ChatTemplates, SplitserveError, Tokenizer, TokenizerUnavailable

NOW_S = 1_700_000_000.0
OURS = (CONTRACT_MAJOR, CONTRACT_MINOR)
MODEL = Model("toy", "d" * 64, "float32", 97, 200, (3,), readiness=Readiness.READY)
EXECUTOR = Executor(
    address="e0:1",
    executor_epoch=int((NOW_S - 60) * 1e9),
    is_connected=True,
    model_name="toy",
    dtype="float32",
    block_size=16,
    num_device_blocks=64,
    num_free_device_blocks=64,
    num_host_blocks=0,
    num_waiting_requests=0,
    num_running_requests=0,
    num_steps=5,
    num_preemptions=0,
    num_swapped_requests=0,
    num_free_host_blocks=0,
    num_cached_device_blocks=0,
    is_draining=False,
    model_digest="d" * 64,
    software_version="1",
    contract_version=OURS,
)
LIST = ExecutorList((EXECUTOR,), 0, 0, NOW_S, "1", OURS)


async def check(executors: ExecutorList | SplitserveError) -> list[Finding]:
    async def list_executors() -> ExecutorList:
        if isinstance(executors, SplitserveError):
            raise executors
        return executors

    findings = await check_executors(list_executors, MODEL, lambda: NOW_S)
    return [each for each in findings if each.state is not State.OK]


async def test_nothing_is_wrong_with_a_cluster_that_is_well() -> None:
    assert await check(LIST) == []


def changed(**changes: object) -> ExecutorList:
    return replace(LIST, executors=(replace(EXECUTOR, **changes),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("executors", "name", "state"),
    [
        (replace(LIST, executors=()), "executors", State.WRONG),
        (changed(is_connected=False), "executor e0:1", State.WRONG),
        (changed(is_draining=True), "executor e0:1", State.WARNING),
        (changed(model_digest="e" * 64), "model of e0:1", State.WRONG),
        (changed(contract_version=(OURS[0] + 1, 0)), "contract of executor e0:1", State.WRONG),
        (changed(executor_epoch=int((NOW_S + 99) * 1e9)), "clock of e0:1", State.WRONG),
        (changed(slow_compute_reason="no compiler"), "code of e0:1", State.WARNING),
        (changed(software_version="2"), "software", State.WARNING),
        (replace(LIST, contract_version=None), "contract of scheduler", State.WARNING),
        (replace(LIST, now_s=NOW_S + 3600), "clock of the scheduler", State.WRONG),
        (replace(LIST, num_unfitting_requests=2), "requests", State.WARNING),
    ],
)
async def test_problem_of_executors_has_a_remedy(
    executors: ExecutorList, name: str, state: State
) -> None:
    (finding,) = await check(executors)
    assert (finding.name, finding.state) == (name, state)
    assert finding.meaning
    assert finding.remedy


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (CallerUnknown("who?", "CALLER_UNKNOWN"), "--api-key-file"),
        (CallerNotAllowed("no", "CALLER_NOT_ALLOWED"), "scope operator"),
        (SplitserveError("no such method", "METHOD_UNKNOWN"), "--cluster-address"),
        (ServerUnreachable("gone"), "log"),
    ],
)
async def test_refusal_names_the_remedy_when_executors_are_unlisted(
    error: SplitserveError, remedy: str
) -> None:
    (finding,) = await check(error)
    assert finding.state is State.WRONG
    assert remedy in finding.remedy


class Said:
    """A scheduler that answers so."""

    def __init__(self, answer: Callable[[], Model]) -> None:
        self._answer = answer

    async def get_model(self) -> Model:
        return self._answer()


async def test_model_is_wrong_when_missing_or_stuck() -> None:
    def nobody() -> Model:
        raise ModelNotReady("no executor")

    findings, model = await check_model(Said(nobody))
    assert (findings[0].state, model) == (State.WRONG, None)
    stuck = replace(MODEL, readiness=Readiness.NO_PROGRESS)
    findings, model = await check_model(Said(lambda: stuck))
    assert (findings[0].state, model) == (State.WRONG, stuck)
    assert "NO_PROGRESS" in findings[0].meaning
    findings, _ = await check_model(Said(lambda: MODEL))
    assert findings[0].state is State.OK


@pytest.mark.parametrize(("marker", "num_findings"), [("<tool_call>", 0), ("CALL:", 1)])
async def test_tool_calls_are_a_warning_when_their_notation_is_unknown(
    marker: str, num_findings: int
) -> None:
    templates = ChatTemplates({"default": f"{{{{ tools }}}} {marker}"}, {})
    tokenizer = Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE()), templates)

    async def read() -> Tokenizer:
        return tokenizer

    findings = await check_tool_calls(read)
    assert [each.state for each in findings] == [State.WARNING] * num_findings


async def test_tool_calls_are_not_checked_without_a_tokenizer() -> None:
    async def read() -> Tokenizer:
        raise TokenizerUnavailable("none")

    assert await check_tool_calls(read) == []


async def test_pools_are_checked_of_local_executors() -> None:
    huge = replace(EXECUTOR, num_host_blocks=2**20, block_bytes=2**40)
    elsewhere = replace(huge, address="e0.example:1")
    assert await check(replace(LIST, executors=(elsewhere,))) == []
    here = replace(huge, address="127.0.0.1:1")
    assert [each.name for each in await check(replace(LIST, executors=(here,)))] == ["pools"]


@pytest.mark.parametrize(
    ("ahead_s", "state", "found"),
    [
        (0.0, State.OK, "agrees with this machine's within 0.200 s"),
        (0.09, State.OK, "agrees"),
        (0.5, State.OK, "at least 0.4 s ahead of"),
        (5.0, State.WARNING, "at least 4.9 s ahead of"),
        (-5.0, State.WARNING, "at least 4.9 s behind"),
        (3600.0, State.WRONG, "at least 3599.9 s ahead"),
        (-3600.0, State.WRONG, "at least 3599.9 s behind"),
    ],
)
def test_clock_offset_is_the_certain_part(ahead_s: float, state: State, found: str) -> None:
    finding = check_clock("clock", 1000.1 + ahead_s, 1000.0, 1000.2)
    assert finding.state is state
    assert finding.found.startswith(found)


def test_clock_that_says_whole_seconds_may_be_almost_one_later() -> None:
    assert check_clock("clock", 1000.0, 1000.9, 1000.95, resolution_s=1.0).state is State.OK
    assert check_clock("clock", 998.0, 1000.9, 1000.95, resolution_s=1.0).state is State.WARNING
