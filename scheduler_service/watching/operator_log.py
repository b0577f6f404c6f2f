"""Log lines and audit events of requests and executors."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import assert_never

from scheduler_service.audit import Audit
from scheduler_service.audit import audit as audit_events
from scheduler_service.callers import num_computed_outputs
from scheduler_service.journal import Journal
from scheduler_service.scheduler import HealthChange, LossCause, RequestSubmitted, effects
from scheduler_service.scheduler.values import Request
from scheduler_service.watching.transition import RequestRefused, Submission, Transition, end_of
from splitserve_common import LogContext, logging_about

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Known:
    """Unfinished request. `num_resumed`: number of output tokens that it was submitted with."""

    context: LogContext
    num_resumed: int


class OperatorLog:
    """Writes log lines and audit events of the scheduler's turns. Implements `Watcher`.

    `journal`: its position is logged when an engine fails, so that the event can be found.
    """

    def __init__(self, audit: Audit, journal: Journal) -> None:
        self._audit = audit
        self._journal = journal
        self._known: dict[str, _Known] = {}

    def see(self, turn: Transition) -> None:
        event = turn.event
        if isinstance(event, RequestSubmitted) and turn.submission is not None:
            self._submitted(event.request, turn.submission, turn.model_name)
        elif isinstance(event, RequestRefused):
            self._refused(event)
        for effect in turn.effects:
            if isinstance(effect, effects.DeliverTokens):
                for request in effect.events.finished:
                    self._ended(request)
            elif isinstance(effect, effects.RequestFinished):
                self._ended(effect.request)
            elif isinstance(effect, effects.ExecutorServes):
                self._joined(effect.address, turn)
            elif not isinstance(effect, effects.SendStep):
                self._see_trouble(effect)

    def _see_trouble(self, effect: effects.Effect) -> None:
        match effect:
            case (
                effects.RequestQuarantined() | effects.RequestAcquitted() | effects.RequestBlamed()
            ):
                self._suspected(effect)
            case effects.ExecutorGone():
                self._gone(effect)
            case effects.ExecutorHealthChanged(address, change):
                _log_health(address, change)
            case effects.EngineFailed():
                self._engine_failed(effect)

    # -- Requests ------------------------------------------------------------------------------

    def _submitted(self, request: Request, submission: Submission, model_name: str) -> None:
        admission = submission.admission
        context = LogContext(admission.name.own_id, admission.trace_id)
        self._known[request.request_id] = _Known(context, num_computed_outputs(request))
        self._audit.record(
            audit_events.RequestAdmitted(
                admission.caller,
                request.scheduling.tenant,
                context.request_id,
                request.sequences[0].num_prompt_tokens,
                request.params.max_tokens,
                request.params.num_sequences,
                model_name,
                request.scheduling.adapter,
            )
        )

    def _refused(self, refused: RequestRefused) -> None:
        self._audit.record(
            audit_events.RequestRefused(
                refused.caller, refused.tenant, refused.name.own_id, refused.reason, refused.limit
            )
        )

    def _ended(self, request: Request) -> None:
        known = self._known.pop(request.request_id, None)
        if known is None:
            return
        num_tokens = num_computed_outputs(request) - known.num_resumed
        tenant, reason = request.scheduling.tenant, end_of(request)
        self._audit.record(
            audit_events.RequestEnded(tenant, known.context.request_id, reason, num_tokens)
        )

    def _suspected(
        self,
        effect: effects.RequestQuarantined | effects.RequestAcquitted | effects.RequestBlamed,
    ) -> None:
        """Logs that a request is quarantined, acquitted, or blamed for the loss of executors."""
        request = effect.request
        known = self._known.get(request.request_id)
        if known is None:
            return
        with logging_about(known.context):
            match effect:
                case effects.RequestQuarantined():
                    _log.warning("request_quarantined num_trials=%d", request.num_trials_left)
                    tenant, own_id = request.scheduling.tenant, known.context.request_id
                    self._audit.record(audit_events.RequestQuarantined(tenant, own_id))
                case effects.RequestAcquitted(_, reason):
                    _log.info("request_acquitted why=%s", reason.value)
                case effects.RequestBlamed():
                    _log.error("request_kills_executors why=%r", request.error)

    # -- Executors -----------------------------------------------------------------------------

    def _joined(self, address: str, turn: Transition) -> None:
        gone = [each for each in turn.effects if isinstance(each, effects.ExecutorGone)]
        known = [turn.scheduler.executors.get(address), *gone]
        epoch = next(each.epoch for each in known if each is not None and each.address == address)
        _log.info("executor_joined address=%s epoch=%d", address, epoch)
        self._audit.record(audit_events.ExecutorRegistered(address, epoch, turn.model_name))

    def _gone(self, gone: effects.ExecutorGone) -> None:
        if gone.is_drained:
            _log.info("executor_drained address=%s", gone.address)
            self._audit.record(audit_events.ExecutorDrained(gone.address, gone.epoch))
            return
        fields = gone.address, len(gone.requests), gone.why
        if gone.cause is LossCause.WITHDRAWN:
            _log.error("executor_withdrawn address=%s num_requests=%d reason=%r", *fields)
            withdrawn = audit_events.ExecutorWithdrawn(gone.address, gone.epoch, len(gone.requests))
            self._audit.record(withdrawn)
            return
        _log.warning("executor_lost address=%s num_requests=%d reason=%r", *fields)
        self._audit.record(audit_events.ExecutorLost(gone.address, gone.epoch, len(gone.requests)))

    def _engine_failed(self, failed: effects.EngineFailed) -> None:
        _log.error(
            "core_invariant_broken address=%s call=%s journal=%s",
            failed.address,
            failed.call,
            self._journal.position,
            exc_info=failed.error,
        )


def _log_health(address: str, change: HealthChange) -> None:
    match change:
        case HealthChange.FAILING:
            _log.error("executor_failing address=%s", address)
        case HealthChange.RECOVERED:
            _log.info("executor_recovered address=%s", address)
        case HealthChange.PROBE_FAILED:
            _log.warning("executor_probe_failed address=%s", address)
        case HealthChange.REINSTATED:
            _log.warning("executor_reinstated address=%s", address)
        case _:
            assert_never(change)
