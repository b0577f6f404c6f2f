"""Audit log interface, its events, and the merging of repeated refusals."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

from splitserve_common import peer_host


class Audit(Protocol):
    """Receiver of audit events; any thread may call it. `record` never waits for the log."""

    def record(self, event: AuditEvent) -> None:
        """Records an event."""
        ...

    def close(self) -> None:
        """Writes the remaining events and ends the log."""
        ...


class NoAudit:
    """Audit log that records nothing. Implements `Audit`."""

    def record(self, event: AuditEvent) -> None:
        pass

    def close(self) -> None:
        pass


# -- Events ----------------------------------------------------------------------------------------
#
# Events hold names, numbers and reasons; no field has content of a request. Fields are written as
# JSON under these names; docs/security.md explains them.


@dataclass(frozen=True, slots=True)
class RequestAdmitted:
    """Admission of a request by the service.

    `adapter`: empty for none. `max_tokens`: None if the request named none.
    """

    caller: str
    tenant: str
    request_id: str
    num_prompt_tokens: int
    max_tokens: int | None
    num_sequences: int
    model: str
    adapter: str


@dataclass(frozen=True, slots=True)
class RequestRefused:
    """Refusal of a request.

    `limit`: the tenant's limit that caused the refusal; empty for other causes. Repeats are counted
    as for `CallerRefused`, per caller, reason and limit; `tenant` and `request_id` are those of the
    first refusal.
    """

    caller: str
    tenant: str
    request_id: str
    reason: str
    limit: str
    num_times: int = 1


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """End of an accepted request.

    `reason`: finish reason, or why the request had none. `num_output_tokens`: tokens computed here,
    without resumed ones.
    """

    tenant: str
    request_id: str
    reason: str
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class CallerRefused:
    """Refusal of a caller, `num_times` from that peer.

    The first refusal is recorded at once. Further ones in the same second are recorded together, if
    they differ in nothing but the peer's port. `caller`: owner of the credential or certificate, if
    known.
    """

    method: str
    peer: str
    reason: str
    caller: str = ""
    num_times: int = 1


@dataclass(frozen=True, slots=True)
class OperatorCalled:
    """Answered call of a method for operators. `caller`: as in `CallerRefused`."""

    method: str
    peer: str
    caller: str


@dataclass(frozen=True, slots=True)
class ExecutorRegistered:
    """Registration of an executor that is connected and gets requests."""

    address: str
    executor_epoch: int
    model: str


@dataclass(frozen=True, slots=True)
class ExecutorRefused:
    """Refused registration of an executor; repeats are counted as for `CallerRefused`."""

    address: str
    peer: str
    reason: str
    num_times: int = 1


@dataclass(frozen=True, slots=True)
class ExecutorLost:
    """Loss of an executor: it gets no more requests, and its requests go on elsewhere."""

    address: str
    executor_epoch: int
    num_requests: int


@dataclass(frozen=True, slots=True)
class ExecutorWithdrawn:
    """Withdrawal of an executor that computes wrongly, as other executors show.

    Its requests go on elsewhere. The executor gets no requests until it has computed a probe.
    """

    address: str
    executor_epoch: int
    num_requests: int


@dataclass(frozen=True, slots=True)
class RequestQuarantined:
    """Quarantine of a request during whose steps executors were lost; it runs alone now.

    If one more executor is lost, the request ends: `RequestEnded` has the reason
    EXECUTOR_LOST_REPEATEDLY.
    """

    tenant: str
    request_id: str


@dataclass(frozen=True, slots=True)
class ExecutorDrained:
    """Departure of an executor after a drain, asked for by an operator or by the executor."""

    address: str
    executor_epoch: int


@dataclass(frozen=True, slots=True)
class KeysReloaded:
    """Change of the file of API keys. `added`, `removed`, `changed`: ids of keys.

    A revoked key, for example, is `changed`.
    """

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EventsDropped:
    """Gap in the log: `num_events` events came faster than they could be written."""

    num_events: int


AuditEvent = (
    RequestAdmitted
    | RequestRefused
    | RequestEnded
    | CallerRefused
    | OperatorCalled
    | ExecutorRegistered
    | ExecutorRefused
    | ExecutorLost
    | ExecutorWithdrawn
    | RequestQuarantined
    | ExecutorDrained
    | KeysReloaded
    | EventsDropped
)


# -- Merging of refusals ---------------------------------------------------------------------------
#
# A flood of refusals must neither fill a disk nor hide other callers.

# Most kinds of refusals told apart in one second. Further refusals are merged over all peers and
# callers, by fields with few values, which servers choose.
MAX_PEERS = 256
OTHERS = "others"

Refusal = CallerRefused | ExecutorRefused | RequestRefused
# Type, host, caller, method or limit, and reason.
_Key: TypeAlias = tuple[type[Refusal], str, str, str, str]


@dataclass(slots=True)
class _Second:
    first: Refusal
    number: int
    num_more: int = 0


class RefusedPeers:
    """Filter that passes the first refusal of each kind in a second, and counts the rest."""

    def __init__(self) -> None:
        self._seconds: dict[_Key, _Second] = {}

    def add(self, event: Refusal, now_s: float) -> Refusal | None:
        """Returns the event to write now; None for a counted repeat. Call `take_past` before."""
        key = _key(event)
        if key not in self._seconds and len(self._seconds) >= MAX_PEERS:
            event = _of_others(event)
            key = _key(event)
        second = self._seconds.get(key)
        if second is None:
            self._seconds[key] = _Second(event, int(now_s))
            return event
        second.num_more += event.num_times
        return None

    def take_past(self, now_s: float) -> list[Refusal]:
        """Returns the counted refusals of seconds that are over."""
        past = [key for key, second in self._seconds.items() if second.number != int(now_s)]
        seconds = [self._seconds.pop(key) for key in past]
        return [replace(each.first, num_times=each.num_more) for each in seconds if each.num_more]

    def take_all(self) -> list[Refusal]:
        """Returns all counted refusals."""
        return self.take_past(-1.0)


def _key(event: Refusal) -> _Key:
    match event:
        case CallerRefused():
            host = peer_host(event.peer)
            return CallerRefused, host, event.caller, event.method, event.reason
        case ExecutorRefused():
            return ExecutorRefused, peer_host(event.peer), "", "", event.reason
        case RequestRefused():
            return RequestRefused, "", event.caller, event.limit, event.reason


def _of_others(event: Refusal) -> Refusal:
    match event:
        case CallerRefused():
            return replace(event, peer=OTHERS, caller="")
        case ExecutorRefused():
            return replace(event, peer=OTHERS, address="")
        case RequestRefused():
            return replace(event, caller=OTHERS, tenant="", request_id="")
