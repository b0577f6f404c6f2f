"""Checks of a scheduler, its executors, their compatibility and their clocks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Protocol

from splitserve_cli.checks.finding import Finding, ok, warning, wrong
from splitserve_cli.checks.machine import check_pools
from splitserve_client import (
    CallerNotAllowed,
    CallerUnknown,
    Executor,
    ExecutorList,
    Model,
    ModelNotReady,
    Readiness,
)
from splitserve_common import is_loopback
from splitserve_contract import CONTRACT_MAJOR, CONTRACT_MINOR
from splitserve_text import SplitserveError, Tokenizer, unread_calls

_DIGEST_CHARS = 12
_START_EXECUTOR = "start an executor with --scheduler; if it does not register, see its log"
_NTP = "run chrony or another NTP client on both machines"


class AsksScheduler(Protocol):
    """Client of a scheduler, such as `AsyncClient`."""

    async def get_model(self) -> Model:
        """Returns the served model."""
        ...


async def check_model(scheduler: AsksScheduler) -> tuple[list[Finding], Model | None]:
    """Checks that a model is served; returns findings and the model."""
    try:
        model = await scheduler.get_model()
    except ModelNotReady:
        meaning = "no executor has registered: no request can run"
        return [wrong("model", "none", meaning, _START_EXECUTOR)], None
    except SplitserveError as error:
        return [of_error("model", error)], None
    name = f"{model.name} (digest {model.digest[:_DIGEST_CHARS]})"
    if model.readiness not in (Readiness.READY, Readiness.UNKNOWN):
        meaning = f"the scheduler reports {model.readiness.value}: requests wait or are refused"
        remedy = "see docs/operations.md, Health"
        return [wrong("model", name, meaning, remedy)], model
    return [ok("model", name)], model


async def check_tool_calls(read_tokenizer: Callable[[], Awaitable[Tokenizer]]) -> list[Finding]:
    """Checks that the gateway can read the tool calls of the model's chat template."""
    try:
        tokenizer = await read_tokenizer()
    except SplitserveError:
        return []  # a model of token ids, or one whose problem the gateway reports
    assumed = await asyncio.to_thread(unread_calls, tokenizer)
    if assumed is None:
        return []
    meaning = f"the gateway reads calls as {assumed}; others reach clients as text"
    remedy = "give the gateway --tool-call-parser, or another --chat-template: docs/openai.md"
    return [
        warning(
            "tool calls",
            "the chat template writes calls in no notation that is known",
            meaning,
            remedy,
        )
    ]


async def check_executors(
    list_executors: Callable[[], Awaitable[ExecutorList]],
    model: Model | None,
    now_s: Callable[[], float] = time.time,
) -> list[Finding]:
    """Checks the executors' health, contract, versions, models, clocks and KV pools."""
    asked_s = now_s()
    try:
        executors = await list_executors()
    except SplitserveError as error:
        return [of_error("executors", error)]
    answered_s = now_s()
    findings = [_check_contract("scheduler", executors.contract_version)]
    if executors.now_s is not None:
        findings.append(check_clock("clock of the scheduler", executors.now_s, asked_s, answered_s))
    if not executors.executors:
        findings.append(wrong("executors", "none", "no request can run", _START_EXECUTOR))
    for each in executors.executors:
        findings += _check_executor(each, model, executors.now_s)
    findings += _check_versions(executors)
    here = [each for each in executors.executors if is_loopback(each.address)]
    pools = check_pools(here)
    findings += [] if pools is None else [pools]
    if executors.num_unfitting_requests:
        found = f"{executors.num_unfitting_requests} fit no registered executor"
        remedy = "splitserve explain --next; start an executor that can run them"
        findings.append(warning("requests", found, "they wait indefinitely", remedy))
    return findings


def of_error(name: str, error: SplitserveError) -> Finding:
    """Returns the finding for a failed call."""
    found = f"{error.message} [{error.reason}]" if error.reason else error.message
    if isinstance(error, CallerUnknown):
        remedy = (
            "give --api-key-file or --cluster-token-file; splitserve keys list shows the valid keys"
        )
        return wrong(name, found, "the credential is missing, or unknown to the server", remedy)
    if isinstance(error, CallerNotAllowed):
        remedy = "a key with the scope operator, or a certificate for operators: docs/security.md"
        return wrong(name, found, "the credential is valid, but does not permit this", remedy)
    if error.reason == "METHOD_UNKNOWN":
        remedy = "give --cluster-address, its address for operators"
        return wrong(name, found, "this address serves clients only", remedy)
    remedy = "see its log, and the findings about the connection above"
    return wrong(name, found, "the server cannot be queried", remedy)


def _check_executor(each: Executor, model: Model | None, now_s: float | None) -> Iterator[Finding]:
    name = f"executor {each.address}"
    if not each.is_connected:
        meaning = "its stream is broken; its requests move to other executors"
        yield wrong(
            name, "not connected", meaning, "check its log, and the network to the scheduler"
        )
    elif each.is_failing:
        meaning = "its steps or rows fail"
        if each.is_withdrawn:
            meaning += ": it gets no requests until it completes a probe of the scheduler"
        yield wrong(name, "fails", meaning, "check its log, device and driver; restart it")
    elif each.is_draining:
        remedy = "to keep it: splitserve drain --undo"
        yield warning(name, "drains", "it gets no new requests", remedy)
    else:
        yield ok(
            name,
            f"{each.num_running_requests} running, {each.num_waiting_requests} waiting,"
            f" {each.num_free_device_blocks} of {each.num_device_blocks} blocks free",
        )
    if each.slow_compute_reason:
        meaning = "its model runs in slower code than others of its kind"
        remedy = "mend what is named; its log says at start what it costs"
        yield warning(f"code of {each.address}", each.slow_compute_reason, meaning, remedy)
    if model is not None and each.model_digest and each.model_digest != model.digest:
        own, served = each.model_digest[:_DIGEST_CHARS], model.digest[:_DIGEST_CHARS]
        meaning, remedy = (
            "its output is that of another model",
            "give all executors the same folder",
        )
        yield wrong(
            f"model of {each.address}",
            f"digest {own}, the served model has {served}",
            meaning,
            remedy,
        )
    yield _check_contract(name, each.contract_version)
    if now_s is not None:
        yield _check_start(f"clock of {each.address}", each.executor_epoch / 1e9, now_s)


def _check_start(name: str, started_s: float, now_s: float) -> Finding:
    """Checks the clock of an executor by its start time.

    Executors report no other time, so a clock that is behind only makes the executor look older. An
    executor far behind does not get here: it refuses a scheduler that is an hour ahead.
    """
    if started_s > now_s:
        found = f"its start time is {started_s - now_s:.0f} s in the future"
        meaning = "its clock is ahead of the scheduler's: a restarted executor may seem older"
        return wrong(name, found, meaning, _NTP)
    date = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(started_s))
    return ok(name, f"not ahead; by its clock, the executor started at {date}")


def _check_contract(name: str, version: tuple[int, int] | None) -> Finding:
    what = f"contract of {name}"
    if version is None:
        remedy = "upgrade it: docs/operations.md, Rolling upgrade"
        return warning(what, "not reported", "it is older than this software", remedy)
    text = ".".join(map(str, version))
    if version[0] != CONTRACT_MAJOR:
        meaning = f"this software uses {CONTRACT_MAJOR}.{CONTRACT_MINOR}: they are incompatible"
        return wrong(what, text, meaning, "install the same version everywhere")
    return ok(what, text)


def _check_versions(executors: ExecutorList) -> Iterator[Finding]:
    versions = {each.software_version for each in executors.executors}
    known = sorted((versions | {executors.software_version}) - {""})
    if len(known) > 1:
        meaning = "they are compatible, but features that the oldest lacks are disabled"
        remedy = "complete the upgrade: docs/operations.md, Rolling upgrade"
        yield warning("software", ", ".join(known), meaning, remedy)
    elif known:
        yield ok("software", known[0])


# -- clocks of other machines ----------------------------------------------------------------------

_MUCH_S = 60.0
_LITTLE_S = 1.0


def check_clock(
    name: str, theirs_s: float, asked_s: float, answered_s: float, resolution_s: float = 0.0
) -> Finding:
    """Compares a clock with that of this machine.

    `theirs_s` was read between `asked_s` and `answered_s` of this machine's clock.

    The true time may be up to `resolution_s` later than `theirs_s`.
    """
    early_s = theirs_s - answered_s
    late_s = theirs_s + resolution_s - asked_s
    if early_s <= 0 <= late_s:
        return ok(name, f"agrees with this machine's within {late_s - early_s:.3f} s")
    apart_s = early_s if early_s > 0 else late_s
    found = (
        f"at least {abs(apart_s):.1f} s {'ahead of' if apart_s > 0 else 'behind'} this machine's"
    )
    if abs(apart_s) >= _MUCH_S:
        meaning = "certificates and tokens may be refused as expired or not yet valid"
        return wrong(name, found, meaning, _NTP)
    if abs(apart_s) >= _LITTLE_S:
        return warning(name, found, "logs and traces of both machines cannot be compared", _NTP)
    return ok(name, found)
