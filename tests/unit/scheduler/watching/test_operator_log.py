"""Tests that audit log and log lines follow from turns alone."""

from __future__ import annotations

import logging

import pytest

from scheduler_service.audit import audit as audit_events
from scheduler_service.journal import NoJournal
from scheduler_service.request_limits import RequestName
from scheduler_service.scheduler import (
    EngineFailed,
    ExecutorGone,
    ExecutorHealthChanged,
    ExecutorServes,
    HealthChange,
    LossCause,
    RequestFinished,
    RequestQuarantined,
    StepCompleted,
)
from scheduler_service.scheduler.values import (
    FinishReason,
    Request,
    SamplingParams,
    StepOutcome,
    StepStatus,
)
from scheduler_service.watching import OperatorLog
from tests.support.core.machines import submission, transition
from tests.support.security.credentials import ListedAudit

ADDRESS = "executor:1"


@pytest.fixture
def audit() -> ListedAudit:
    return ListedAudit()


@pytest.fixture
def log(audit: ListedAudit, caplog: pytest.LogCaptureFixture) -> OperatorLog:
    caplog.set_level(logging.INFO, "scheduler_service")
    return OperatorLog(audit, NoJournal())


def gone(cause: LossCause, *, is_drained: bool = False) -> ExecutorGone:
    return ExecutorGone(ADDRESS, 7, cause, "why", [], 1, is_drained=is_drained)


@pytest.mark.parametrize(
    ("effect", "event", "level"),
    [
        (
            gone(LossCause.BLAMELESS, is_drained=True),
            audit_events.ExecutorDrained(ADDRESS, 7),
            logging.INFO,
        ),
        (gone(LossCause.DIED), audit_events.ExecutorLost(ADDRESS, 7, 0), logging.WARNING),
        (gone(LossCause.BLAMELESS), audit_events.ExecutorLost(ADDRESS, 7, 0), logging.WARNING),
        (
            gone(LossCause.WITHDRAWN),
            audit_events.ExecutorWithdrawn(ADDRESS, 7, 0),
            logging.ERROR,
        ),
    ],
)
def test_operator_log_tells_how_an_executor_left(
    log: OperatorLog,
    audit: ListedAudit,
    caplog: pytest.LogCaptureFixture,
    effect: ExecutorGone,
    event: audit_events.AuditEvent,
    level: int,
) -> None:
    log.see(transition(effect))

    assert audit.events == [event]
    (record,) = caplog.records
    assert record.levelno == level
    assert f"address={ADDRESS}" in record.getMessage()


def test_operator_log_tells_the_epoch_of_a_short_life(log: OperatorLog, audit: ListedAudit) -> None:
    log.see(transition(ExecutorServes(ADDRESS), gone(LossCause.DIED)))

    assert audit.events == [
        audit_events.ExecutorRegistered(ADDRESS, 7, ""),
        audit_events.ExecutorLost(ADDRESS, 7, 0),
    ]


def test_operator_log_tells_an_end_once(log: OperatorLog, audit: ListedAudit) -> None:
    request = Request.create("key", [1, 2], SamplingParams(max_tokens=5), arrival=1, seed=1)
    log.see(submission(request, RequestName("mine")))
    log.see(transition(RequestQuarantined(request)))
    request.finish_reason = FinishReason.LENGTH
    log.see(transition(RequestFinished(request)))
    log.see(transition(RequestFinished(request), RequestQuarantined(request)))

    assert audit.events == [
        audit_events.RequestAdmitted("", "", "mine", 2, 5, 1, "", ""),
        audit_events.RequestQuarantined("", "mine"),
        audit_events.RequestEnded("", "mine", "length", 0),
    ]


def test_operator_log_counts_only_tokens_computed_here(
    log: OperatorLog, audit: ListedAudit
) -> None:
    request = Request.create(
        "key", [1, 2], SamplingParams(max_tokens=5), arrival=1, seed=1, resume_token_ids=[[3, 4, 5]]
    )
    log.see(submission(request))
    log.see(transition(RequestFinished(request)))

    assert audit.events[-1] == audit_events.RequestEnded("", "key", "abandoned", 0)


def test_operator_log_tells_of_health_and_faults(
    log: OperatorLog, caplog: pytest.LogCaptureFixture
) -> None:
    fault = RuntimeError("a fault")
    changes = [ExecutorHealthChanged(ADDRESS, change) for change in HealthChange]
    log.see(transition(*changes, EngineFailed(ADDRESS, "apply", fault)))

    *of_health, failed = caplog.records
    assert [record.getMessage().split()[0] for record in of_health] == [
        change.value for change in HealthChange
    ]
    assert failed.getMessage().startswith(f"core_invariant_broken address={ADDRESS} call=apply")
    assert failed.exc_info is not None
    assert failed.exc_info[1] is fault


COMPLETED = StepCompleted(ADDRESS, StepOutcome(1, StepStatus.OK))


def test_turn_has_no_answer_when_it_broke_the_contract() -> None:
    gone = ExecutorGone(ADDRESS, 1, LossCause.DIED, "broke the step contract", [], 1)

    assert transition(gone, event=COMPLETED).answered is None


@pytest.mark.parametrize(
    ("cause", "is_drained"), [(LossCause.BLAMELESS, True), (LossCause.WITHDRAWN, False)]
)
def test_turn_has_the_answer_when_the_executor_leaves_after_it(
    cause: LossCause, is_drained: bool
) -> None:
    gone = ExecutorGone(ADDRESS, 1, cause, "why", [], 1, is_drained=is_drained)

    assert transition(gone, event=COMPLETED).answered is COMPLETED
