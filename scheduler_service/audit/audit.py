"""Where events of the audit log go: `Audit`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

from splitserve_rpc.addresses import peer_host


class Audit(Protocol):
    """Takes events. It waits for nobody, and may be called in any thread."""

    def record(self, event: AuditEvent) -> None:
        """One more."""
        ...

    def close(self) -> None:
        """Writes what is left."""
        ...


class NoAudit:
    """Nobody has asked for a log. Implements `Audit`."""

    def record(self, event: AuditEvent) -> None:
        pass

    def close(self) -> None:
        pass


# -- What an audit log tells: names, numbers and reasons. No field has content of a request --------
#
# Fields are JSON's, by these names; docs/security.md explains them.


@dataclass(frozen=True, slots=True)
class RequestAdmitted:
    """A request was taken. `adapter`: empty for none. `max_tokens`: None where it named none."""

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
    """A request was not taken. `limit`: of the tenant, if that is why; empty otherwise.

    Counted as `CallerRefused` is, of one caller for one reason and limit; `tenant` and `request_id`
    are those of the first.
    """

    caller: str
    tenant: str
    request_id: str
    reason: str
    limit: str
    num_times: int = 1


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """A request that was taken is over. `reason`: as its finish says, or why it had none.

    `num_output_tokens`: that were computed here, without those that it was resumed with.
    """

    tenant: str
    request_id: str
    reason: str
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class CallerRefused:
    """Somebody may not do what they tried, `num_times` from that peer.

    The first time is told at once, further ones in the same second together, where all but the
    port of the peer is the same. `caller`: whose credential or certificate it was, if one is known.
    """

    method: str
    peer: str
    reason: str
    caller: str = ""
    num_times: int = 1


@dataclass(frozen=True, slots=True)
class OperatorCalled:
    """A method for operators was called, and answered. `caller`: as of `CallerRefused`."""

    method: str
    peer: str
    caller: str


@dataclass(frozen=True, slots=True)
class ExecutorRegistered:
    """An executor is connected and gets requests."""

    address: str
    executor_epoch: int
    model: str


@dataclass(frozen=True, slots=True)
class ExecutorRefused:
    """An executor that wanted to register may not; counted as `CallerRefused` is."""

    address: str
    peer: str
    reason: str
    num_times: int = 1


@dataclass(frozen=True, slots=True)
class ExecutorLost:
    """An executor gets no more requests; those it had go on elsewhere."""

    address: str
    executor_epoch: int
    num_requests: int


@dataclass(frozen=True, slots=True)
class ExecutorWithdrawn:
    """An executor computes wrongly, as others show; its requests go on elsewhere.

    It gets none until it has computed a probe.
    """

    address: str
    executor_epoch: int
    num_requests: int


@dataclass(frozen=True, slots=True)
class RequestQuarantined:
    """Executors were lost during steps of a request, and it is tried alone from now on.

    If one more is, it is over: `RequestEnded` has the reason EXECUTOR_LOST_REPEATEDLY.
    """

    tenant: str
    request_id: str


@dataclass(frozen=True, slots=True)
class ExecutorDrained:
    """An executor was sent away by an operator, or wanted to go, and is gone."""

    address: str
    executor_epoch: int


@dataclass(frozen=True, slots=True)
class KeysReloaded:
    """The file of API keys says something else; ids of keys, `changed`: revoked, for one."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EventsDropped:
    """So many events are not in the log: they came faster than they could be written."""

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


# -- Refusals, few enough that a flood of them fills no disk and hides nobody else -----------------

# Refusals that are told apart in one second. Further ones are told apart by what servers say of
# them, and that is a few names.
MAX_PEERS = 256
OTHERS = "others"

Refusal = CallerRefused | ExecutorRefused | RequestRefused
# Type, host, caller, what was tried, and why it was refused.
_Key: TypeAlias = tuple[type[Refusal], str, str, str, str]


@dataclass(slots=True)
class _Second:
    first: Refusal
    number: int
    num_more: int = 0


class RefusedPeers:
    """Lets the first refusal of its kind in a second pass, and counts the rest."""

    def __init__(self) -> None:
        self._seconds: dict[_Key, _Second] = {}

    def add(self, event: Refusal, now_s: float) -> Refusal | None:
        """What is to be written now. Call `take_past` before."""
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
        """What was counted in seconds that are over."""
        past = [key for key, second in self._seconds.items() if second.number != int(now_s)]
        seconds = [self._seconds.pop(key) for key in past]
        return [replace(each.first, num_times=each.num_more) for each in seconds if each.num_more]

    def take_all(self) -> list[Refusal]:
        """What was counted so far."""
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
