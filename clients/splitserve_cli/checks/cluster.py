"""Checks of a scheduler, its executors, their compatibility and their clocks."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Protocol

from splitserve_cli.checks.finding import Finding, ok, warning, wrong
from splitserve_cli.checks.machine import check_pools
from splitserve_client.errors import CallerNotAllowed, CallerUnknown, ModelNotReady
from splitserve_client.scheduler_info import Executor, ExecutorList, Model, Readiness
from splitserve_rpc.addresses import is_loopback
from splitserve_rpc.contract import CONTRACT_MAJOR, CONTRACT_MINOR
from splitserve_text.errors import SplitserveError

_DIGEST_CHARS = 12


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
        remedy = "start one, with --scheduler; its log says why it does not come"
        return [
            wrong("model", "none", "no executor has registered: nobody is served", remedy)
        ], None
    except SplitserveError as error:
        return [of_error("model", error)], None
    name = f"{model.name} (digest {model.digest[:_DIGEST_CHARS]})"
    if model.readiness not in (Readiness.READY, Readiness.UNKNOWN):
        meaning = f"it says {model.readiness.value}: requests wait or are refused"
        remedy = "docs/operations.md, Health, says what each word asks for"
        return [wrong("model", name, meaning, remedy)], model
    return [ok("model", name)], model


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
        remedy = "start one, with --scheduler; its log says why it does not come"
        findings.append(wrong("executors", "none", "nobody is served", remedy))
    for each in executors.executors:
        findings += _check_executor(each, model, executors.now_s)
    findings += _check_versions(executors)
    here = [each for each in executors.executors if is_loopback(each.address)]
    pools = check_pools(here)
    findings += [] if pools is None else [pools]
    if executors.num_unfitting_requests:
        found = f"{executors.num_unfitting_requests} fit no executor that is there"
        remedy = "splitserve explain --next; start an executor that can run them"
        findings.append(warning("requests", found, "they wait for ever", remedy))
    return findings


def of_error(name: str, error: SplitserveError) -> Finding:
    """Returns the finding for a failed call."""
    found = f"{error.message} [{error.reason}]" if error.reason else error.message
    if isinstance(error, CallerUnknown):
        remedy = (
            "give --api-key-file, or --cluster-token-file; splitserve keys list has those known"
        )
        return wrong(name, found, "our credential is none, or not known there", remedy)
    if isinstance(error, CallerNotAllowed):
        remedy = "a key with the scope operator, or a certificate for operators: docs/security.md"
        return wrong(name, found, "our credential is known, and not for this", remedy)
    if error.reason == "METHOD_UNKNOWN":
        remedy = "give --cluster-address, where it is for operators"
        return wrong(name, found, "this address is for clients alone", remedy)
    remedy = "its log, and what is said above of the connection"
    return wrong(name, found, "it cannot be asked", remedy)


def _check_executor(each: Executor, model: Model | None, now_s: float | None) -> Iterator[Finding]:
    name = f"executor {each.address}"
    if not each.is_connected:
        meaning = "its stream is cut; what it ran goes on elsewhere in a moment"
        yield wrong(name, "not connected", meaning, "its log; the network between both")
    elif each.is_failing:
        meaning = "its steps or rows fail"
        if each.is_withdrawn:
            meaning += ": it gets no requests until it has computed one of the scheduler's own"
        yield wrong(name, "fails", meaning, "its log; its device and driver; restart it")
    elif each.is_draining:
        remedy = "splitserve drain --undo, if it should"
        yield warning(name, "drains", "it gets no requests", remedy)
    else:
        yield ok(
            name,
            f"{each.num_running_requests} run, {each.num_waiting_requests} wait,"
            f" {each.num_free_device_blocks} of {each.num_device_blocks} blocks are free",
        )
    if model is not None and each.model_digest and each.model_digest != model.digest:
        own, served = each.model_digest[:_DIGEST_CHARS], model.digest[:_DIGEST_CHARS]
        meaning, remedy = "its answers are those of another model", "give all the same folder"
        yield wrong(
            f"model of {each.address}", f"digest {own}, served is {served}", meaning, remedy
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
        found = f"it says that it started {started_s - now_s:.0f} s from now"
        meaning = "its clock is ahead of the scheduler's: a next life may be taken for an older one"
        return wrong(name, found, meaning, "chrony or another NTP on both")
    date = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(started_s))
    return ok(name, f"not ahead: by it, it started at {date}")


def _check_contract(name: str, version: tuple[int, int] | None) -> Finding:
    what = f"contract of {name}"
    if version is None:
        remedy = "upgrade it: docs/operations.md, Rolling upgrade"
        return warning(what, "not said", "it is older than this software", remedy)
    text = ".".join(map(str, version))
    if version[0] != CONTRACT_MAJOR:
        meaning = f"this software speaks {CONTRACT_MAJOR}.{CONTRACT_MINOR}: they do not go together"
        return wrong(what, text, meaning, "install the same version everywhere")
    return ok(what, text)


def _check_versions(executors: ExecutorList) -> Iterator[Finding]:
    versions = {each.software_version for each in executors.executors}
    known = sorted((versions | {executors.software_version}) - {""})
    if len(known) > 1:
        meaning = "they go together, and some abilities are those of the older ones"
        remedy = "go on with the upgrade: docs/operations.md, Rolling upgrade"
        yield warning("software", ", ".join(known), meaning, remedy)
    elif known:
        yield ok("software", known[0])


# -- clocks of other machines ----------------------------------------------------------------------

_MUCH_S = 60.0
_LITTLE_S = 1.0


def check_clock(
    name: str, theirs_s: float, asked_s: float, answered_s: float, resolution_s: float = 0.0
) -> Finding:
    """Compares a clock with ours. `theirs_s` was read between `asked_s` and `answered_s` of ours.

    The true time may be up to `resolution_s` later than `theirs_s`.
    """
    early_s = theirs_s - answered_s
    late_s = theirs_s + resolution_s - asked_s
    if early_s <= 0 <= late_s:
        return ok(name, f"agrees with ours, within {late_s - early_s:.3f} s")
    apart_s = early_s if early_s > 0 else late_s
    found = f"{abs(apart_s):.1f} s {'ahead of' if apart_s > 0 else 'behind'} ours at least"
    remedy = "chrony or another NTP on both machines"
    if abs(apart_s) >= _MUCH_S:
        meaning = "certificates and tokens may be refused as ended, or as not yet begun"
        return wrong(name, found, meaning, remedy)
    if abs(apart_s) >= _LITTLE_S:
        return warning(name, found, "logs and traces of both cannot be compared", remedy)
    return ok(name, found)
